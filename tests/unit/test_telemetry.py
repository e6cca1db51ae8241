"""What both processes' telemetry is made of: names, log formats, and traces that are there only if wanted."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from tokentape_api.telemetry import Telemetry as ApiTelemetry
from tokentape_assembler.telemetry import Telemetry as AssemblerTelemetry
from tokentape_core import logs
from tokentape_core.metrics import Meter

REGISTRIES = [ApiTelemetry().meter.registry, AssemblerTelemetry().meter.registry]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    root.handlers, root.level = handlers, level


def configured(root: logging.Logger, form: logs.Format) -> io.StringIO:
    logs.configure(form)
    [handler] = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream := io.StringIO())
    return stream


@pytest.mark.parametrize("registry", REGISTRIES, ids=["api", "assembler"])
def test_names(registry: CollectorRegistry) -> None:
    """A name begins with tokentape_ and an area, and ends with its unit; every metric has a text."""
    for family in registry.collect():
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"tokentape(_[a-z]+){2,5}", family.name)
        assert family.documentation.endswith((".", ").")), family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


@pytest.mark.parametrize("registry", REGISTRIES, ids=["api", "assembler"])
def test_every_series_is_there_from_the_start(registry: CollectorRegistry) -> None:
    """A process that has done nothing shows every metric, with every label value, at 0."""
    for family in registry.collect():
        if family.type == "counter" and family.name.startswith("tokentape_"):
            assert family.samples, family.name
            assert {sample.value for sample in family.samples} == {0}, family.name


def test_an_unknown_label_value_is_no_series() -> None:
    """A value that was not named when the metric was made is a KeyError."""
    found = Meter().counters("tokentape_tests_total", "Tests.", outcome=("passed", "failed"))
    with pytest.raises(KeyError):
        found["skipped"].inc()


def test_json_lines(root: logging.Logger) -> None:
    """A canonical line is one JSON object with all that was noted; other lines in its block have its ids."""
    stream = configured(root, "json")
    log = logging.getLogger("tokentape.test")
    with logs.canonical(log, "request", session="s1") as line:
        line["status"] = 200
        logs.note(code="none")
        logs.note_stage("engine", 0.0015)
        log.warning("it is %d o'clock", 5)
    log.info("after")
    inner, own, after = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert inner.items() >= {"event": "it is 5 o'clock", "level": "warning", "session": "s1"}.items()
    assert own.items() >= {"event": "request", "status": 200, "code": "none", "session": "s1"}.items()
    assert own["stages"] == {"engine": 1.5}
    assert "session" not in after
    logs.note(code="nobody hears it")


def test_short_lines(root: logging.Logger) -> None:
    """Time, level, the session's first digits, what happened; what is foreign cannot steer a terminal."""
    stream = configured(root, "console")
    log = logging.getLogger("tokentape.test")
    with logs.canonical(log, "request", session="0123456789") as line:
        line |= {"status": 502, "route": "GET /x", "code": "c", "stages": {"a": 1}, "level": logging.WARNING}
        log.error("a\x1b[2J\nb")
    log.info("after")
    inner, own, after = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d error   01234567 a\\x1b\[2J\\nb", inner)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning 01234567 request GET /x 502 c \d+ ms", own)
    assert re.fullmatch(r"\d\d:\d\d:\d\d info             after", after)


def test_what_orjson_refuses_is_logged(root: logging.Logger) -> None:
    """A lone surrogate or a large integer, which a foreign error may quote, costs no line."""
    stream = configured(root, "json")
    with logs.canonical(logging.getLogger("tokentape.test"), "request") as line:
        line |= {"detail": "\ud800", "bytes": 2**70}
    assert json.loads(stream.getvalue()).items() >= {"detail": "\ud800", "bytes": 2**70}.items()


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_variables(root: logging.Logger, form: logs.Format) -> None:
    """A traceback names lines and the exception, in one line of JSON or several for people."""
    stream = configured(root, form)
    secret = "tt_" + "secret"
    try:
        len(secret) / 0
    except ZeroDivisionError:
        logging.getLogger("tokentape.test").exception("a defect")
    text = stream.getvalue()
    assert "ZeroDivisionError: division by zero" in text
    assert "tt_secret" not in text
    assert (text.count("\n") == 1) == (form == "json")


PROGRAM = """
import sys
{before}
from tokentape_core.tracing import from_environment
import tokentape_api.run, tokentape_assembler.run
print(type(from_environment("test")).__name__, "opentelemetry" in sys.modules)
"""


@pytest.mark.parametrize(
    ("before", "environment", "expected"),
    [
        ("", {}, "NoTracing False"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "OpenTelemetry True"),
        (
            "sys.modules['opentelemetry.sdk.resources'] = None",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
            "NoTracing",
        ),
    ],
    ids=["off", "on", "without the extra"],
)
def test_opentelemetry_is_loaded_only_if_asked_for(
    before: str, environment: dict[str, str], expected: str
) -> None:
    """Without an endpoint nothing of it is imported; without the extra a warning says what to install."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.startswith(expected), result.stderr
    assert ("pip install '.[otel]'" in result.stderr) == ("None" in before)
