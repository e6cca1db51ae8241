"""What an API process tells about itself: metrics, spans and log lines, and what none of them may hold."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import OpenSession
from tests.api.test_auth import bearer, entry
from tests.support.application import application, client_of
from tests.support.scripted import ScriptedEngine, network
from tokentape_api import telemetry
from tokentape_api.app import build_app
from tokentape_api.operations import operations
from tokentape_api.settings import ApiSettings
from tokentape_api.telemetry import CODES, ENGINE_CODES, OTHER_ROUTE, Telemetry
from tokentape_contracts.errors import BY_CODE, TABLE
from tokentape_core import logs
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer
from tokentape_core.tracing import NoTracing, OpenTelemetry, from_environment

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

USER = {"role": "user", "content": "Hello, my name is Rumpelstilzchen"}
OTHER = {"role": "user", "content": "Something else"}


async def scrape(api: httpx.AsyncClient) -> Series:
    """Name and labels → value, of all series of `/metrics` that are ours."""
    reply = await api.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
        if sample.name.startswith("tokentape_")
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"tokentape_{name}", tuple(sorted(labels.items()))]


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> ApiSettings:
    mode = getattr(request, "param", "linear")
    return ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3", mode=mode)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The log of the process, as JSON lines."""
    root = logging.getLogger()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    logs.configure("json")
    [handler] = root.handlers
    stream = io.StringIO()
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    yield stream
    root.handlers, root.level = handlers, level


def requests_of(lines: io.StringIO) -> list[dict[str, Any]]:
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in logged if line["event"] == "request"]


async def test_a_turn_is_counted(api: httpx.AsyncClient, session: OpenSession) -> None:
    """A recorded turn counts once, as a first root, with its tokens and its stages."""
    before = await scrape(api)
    assert (await session.chat(USER)).status_code == 200
    after = await scrape(api)
    route = "POST /sessions/{sid}/v1/chat/completions"
    assert value(before, "turns_recorded_total") == 0
    assert value(after, "turns_recorded_total") == 1
    assert value(after, "turns_roots_total", reason="first") == 1
    assert value(after, "turns_tokens_total", kind="sampled") > 0
    assert value(after, "turns_tokens_total", kind="rendered") > 0
    assert value(after, "api_requests_total", route=route, status="2xx") == 1
    assert value(after, "api_request_seconds_count", route=route) == 1
    for stage in telemetry.STAGES:
        assert value(after, "chat_stage_seconds_count", stage=stage) == 1
    assert value(after, "sessions_opened_total") == 1
    assert value(after, "cache_sessions") == 1
    assert value(after, "cache_bytes") > 0


@pytest.mark.parametrize("settings", ["tree"], indirect=True)
async def test_roots_are_counted_by_reason(api: httpx.AsyncClient, session: OpenSession) -> None:
    """A request that repeats no recorded turn is an unmatched root, one with other tools a new one, too."""
    answer = (await session.chat(USER)).json()["choices"][0]["message"]
    await session.chat(USER, answer, OTHER)
    await session.chat(OTHER)
    await session.chat(USER, answer, OTHER, tools=[{"type": "function", "function": {"name": "ls"}}])
    series = await scrape(api)
    assert {reason: value(series, "turns_roots_total", reason=reason) for reason in telemetry.ROOTS} == {
        "first": 1,
        "unmatched": 1,
        "head_changed": 1,
        "not_appendable": 0,
    }
    assert value(series, "turns_recorded_total") == 4
    assert value(series, "turns_tokens_total", kind="reused") > 0


async def test_a_refused_turn_is_counted_by_code(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine
) -> None:
    """What records nothing counts once, by its code; an engine's fault also as the engine's."""
    await session.chat()
    engine.answer = lambda body: httpx.Response(429, json={"error": "busy"})
    await session.chat(USER)
    engine.answer = lambda body: httpx.Response(200, json={})
    await session.chat(USER)
    series = await scrape(api)
    for code in ("invalid_request", "engine_refused", "engine_reply_invalid"):
        assert value(series, "turns_refused_total", code=code) == 1
        assert value(series, "api_errors_total", code=code) == 1
    assert value(series, "engine_errors_total", code="engine_refused") == 1
    assert value(series, "engine_errors_total", code="engine_reply_invalid") == 1
    assert value(series, "turns_recorded_total") == 0


async def test_concurrent_turns_are_counted_as_conflicts(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine
) -> None:
    """Of two turns that want one place, both are recorded and one counts as a conflict."""
    both = asyncio.Barrier(2)

    async def together(body: dict[str, Any]) -> httpx.Response:
        await both.wait()
        return httpx.Response(200, json=engine.reply(body, "fine"))

    engine.answer = together
    await asyncio.gather(session.chat(USER), session.chat(USER))
    series = await scrape(api)
    assert value(series, "turns_recorded_total") == 2
    assert value(series, "turns_conflicts_total") == 1


async def test_nothing_that_a_client_sends_becomes_a_series(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine
) -> None:
    """After requests of every kind the series are those of the start; no label holds an id or a path."""
    names = (await scrape(api)).keys()
    answers = [
        await api.get("/nowhere/at/all"),
        await api.put("/sessions"),
        await api.get("/sessions/" + "x" * 300),
        await api.get(session.url),
        await session.chat(USER),
        await session.chat({"role": "wizard"}),
        await api.post(f"{session.url}/samples", json={"deadline_s": 0.01}),
        await api.post(f"{session.url}/v1/embeddings", json={}),
        await api.delete(session.url),
        await session.chat(USER),
    ]
    assert {reply.status_code // 100 for reply in answers} == {2, 4, 5}
    series = await scrape(api)
    assert series.keys() == names
    assert session.url.rpartition("/")[2] not in str(names)
    assert value(series, "api_requests_total", route=OTHER_ROUTE, status="4xx") == 1
    assert value(series, "collect_outcomes_total", outcome="deadline_exceeded") == 1
    assert value(series, "sessions_deleted_total") == 1


def test_label_sets_are_those_of_the_code(store: MemoryStore, settings: ApiSettings) -> None:
    """Routes are the application's, codes those of the error table."""
    unused: Any = None
    app = build_app(settings, store=store, engine=unused, renderer=unused, collector=unused)
    routes = [operation.name for operation in operations()]
    assert [route.name for route in app.routes] == routes  # type: ignore[attr-defined]
    assert app.state.services.telemetry.requests.keys() == {
        (route, status) for route in (*routes, OTHER_ROUTE) for status in telemetry.STATUSES
    }
    assert set(CODES) == {error.code for error in TABLE} | {"engine_refused", "client_gone"}
    assert set(ENGINE_CODES) - {"engine_refused"} <= set(BY_CODE)


def test_metrics_of_two_applications_do_not_meet() -> None:
    """Each process has a registry of its own."""
    first, second = Telemetry(), Telemetry()
    first.conflicts.inc()
    assert b"tokentape_turns_conflicts_total 0.0" in second.meter.expose()


async def test_one_line_for_each_request(
    api: httpx.AsyncClient, session: OpenSession, lines: io.StringIO
) -> None:
    """A request's line says method, route, status, session, duration and stages; a refused one's its code."""
    sid = session.url.rpartition("/")[2]
    await session.chat(USER)
    await session.chat()
    await api.get("/health")
    chat, refused = requests_of(lines)
    assert (
        chat.items()
        >= {
            "level": "info",
            "logger": "tokentape.api",
            "method": "POST",
            "route": "POST /sessions/{sid}/v1/chat/completions",
            "status": 200,
            "session": sid,
        }.items()
    )
    assert list(chat["stages"]) == list(telemetry.STAGES)
    assert 0 < sum(chat["stages"].values()) <= chat["duration_ms"]
    assert "code" not in chat
    assert (refused["status"], refused["code"]) == (400, "invalid_request")
    series = await scrape(api)
    for stage, ms in chat["stages"].items():
        observed_ms = value(series, "chat_stage_seconds_sum", stage=stage) * 1000
        assert observed_ms == pytest.approx(ms, abs=0.001)


async def test_a_line_names_the_session_that_was_opened(
    api: httpx.AsyncClient, session: OpenSession, lines: io.StringIO
) -> None:
    """The id that the reply has; lines of other requests have none, and no caller where nobody has a name."""
    sid = (await api.post("/sessions")).json()["session_id"]
    await session.chat(USER)
    await api.post("/sessions", json={"mode": "neither"})
    opened, chat, refused = requests_of(lines)
    assert (opened["opened"], opened["status"]) == (sid, 200)
    assert "session" not in opened
    for line in (chat, refused):
        assert "opened" not in line
    for line in (opened, chat, refused):
        assert "caller" not in line


async def test_a_line_names_the_caller(
    settings: ApiSettings,
    store: MemoryStore,
    engine: ScriptedEngine,
    renderer: ChatRenderer,
    lines: io.StringIO,
    tmp_path: Path,
) -> None:
    """A line has the name of the token, also if it may not do this, and none for a token that nobody has."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("t-1", "driver", name="trainer") + entry("t-2", "agent", name="solver"))
    app = application(renderer, store, network(engine.handle), replace(settings, tokens_file=tokens))
    async with client_of(app) as api:
        url = f"/sessions/{(await api.post('/sessions', headers=bearer('t-1'))).json()['session_id']}"
        body = {"model": "m", "messages": [USER]}
        for token in ("t-2", "t-3"):
            await api.post(f"{url}/v1/chat/completions", json=body, headers=bearer(token))
        await api.delete(url, headers=bearer("t-2"))
        await api.delete(url, headers=bearer("t-1"))
    found = [(line["method"], line["status"], line.get("caller")) for line in requests_of(lines)]
    assert found == [
        ("POST", 200, "trainer"),
        ("POST", 200, "solver"),
        ("POST", 401, None),
        ("DELETE", 403, "solver"),
        ("DELETE", 204, "trainer"),
    ]


async def test_the_lag_of_the_loop_is_observed(api: httpx.AsyncClient) -> None:
    """From the start on, whether or not there are requests."""
    async with asyncio.timeout(5):
        while value(await scrape(api), "api_loop_lag_seconds_count") < 2:
            await asyncio.sleep(0.02)


async def test_a_defect_has_a_line_and_a_traceback(
    session: OpenSession, engine: ScriptedEngine, lines: io.StringIO
) -> None:
    """A defect's request is a 500 with the code `internal_error`; the traceback holds no variables."""

    def fail(body: dict[str, Any]) -> httpx.Response:
        raise ZeroDivisionError

    engine.answer = fail
    await session.chat(USER)
    [line] = requests_of(lines)
    assert (line["status"], line["code"], line["level"]) == (500, "internal_error", "warning")
    assert "ZeroDivisionError" in lines.getvalue()
    assert "Rumpelstilzchen" not in lines.getvalue()


async def test_an_id_that_is_none_is_not_logged(api: httpx.AsyncClient, lines: io.StringIO) -> None:
    """What stands in a path in place of a session id is not copied into the log."""
    await api.get("/sessions/%0Aevil%20line")
    [line] = requests_of(lines)
    assert "session" not in line
    assert "evil" not in lines.getvalue()


async def test_secrets_and_contents_stay_inside(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine, lines: io.StringIO
) -> None:
    """Neither logs nor metrics nor error bodies hold a bearer token, a message or a token id."""
    api.headers["authorization"] = "Bearer tt_s3cr3t"
    replies = [await session.chat(USER), await session.chat({"content": USER["content"]})]
    engine.answer = lambda body: httpx.Response(200, json={"choices": [{"message": USER}]})
    replies.append(await session.chat(USER, OTHER, USER))
    engine.answer = lambda body: httpx.Response(200, content=b"{Rumpelstilzchen")
    replies.append(await session.chat(USER))
    errors = [reply.text for reply in replies if reply.status_code != 200]
    assert len(errors) == 3
    ids = ",".join(str(token) for token in engine.bodies[0]["input_ids"][:8])
    for text in (*errors, lines.getvalue(), (await api.get("/metrics")).text):
        for secret in ("s3cr3t", "Rumpelstilzchen", ids, ids.replace(",", ", ")):
            assert secret not in text


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(api: httpx.AsyncClient, spans: InMemorySpanExporter) -> Iterator[httpx.AsyncClient]:
    """The application with traces that are kept in memory."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app = api._transport.app  # type: ignore[attr-defined]
    app.state.services.telemetry.tracing = OpenTelemetry(provider)
    yield api
    provider.shutdown()


async def test_a_turn_is_one_trace(
    traced: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine, spans: InMemorySpanExporter
) -> None:
    """The agent's trace goes on: the span `chat`, its stages below it, and the engine below its stage."""
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced.headers["traceparent"] = f"00-{trace}-{caller}-01"
    await session.chat(USER)
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"chat", *telemetry.STAGES}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {trace}
    assert f"{found['chat'].parent.span_id:016x}" == caller
    assert {found[stage].parent.span_id for stage in telemetry.STAGES} == {found["chat"].context.span_id}
    assert found["chat"].attributes == {"tokentape.session": session.url.rpartition("/")[2]}
    sent = engine.requests[-1].headers["traceparent"]
    assert sent == f"00-{trace}-{found['engine'].context.span_id:016x}-01"


async def test_a_failed_turn_marks_its_span(
    traced: httpx.AsyncClient, session: OpenSession, spans: InMemorySpanExporter
) -> None:
    """A span of a refused turn has the code, and not the text of the error."""
    await session.chat()
    [span] = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "invalid_request"
    assert not span.status.is_ok
    assert not span.events
    assert span.status.description is None


async def test_without_traces_the_callers_goes_through(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine
) -> None:
    """A process that traces nothing passes a trace on as it came."""
    api.headers["traceparent"] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await session.chat(USER)
    assert engine.requests[-1].headers["traceparent"] == api.headers["traceparent"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_is_off_unless_asked_for(environment: dict[str, str]) -> None:
    """Without an endpoint, or with the standard switches off, nothing is traced."""
    assert isinstance(from_environment("tokentape-api", environment), NoTracing)
