"""Telemetry of separate processes: what they show is what the page says, and one trace crosses them all."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.markdown import DOCS, rows, sections
from tests.support.processes import Fleet, Running, fleet, wait_until
from tests.support.scripted import ScriptedEngine
from tokentape_cli.embedded import EmbeddedValkey

CONTENT = "my name is Rumpelstilzchen"
TRACE = "0af7651916cd43dd8448eb211c80319c"

pytestmark = pytest.mark.slow


@contextmanager
def receiver(exported: list[tuple[str, Any]]) -> Iterator[str]:
    """An OTLP/HTTP receiver on loopback, and its URL; it appends service name and span."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    exported.extend((names["service.name"], span) for span in scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def exported() -> list[tuple[str, Any]]:
    return []


@pytest.fixture(scope="module")
def observed(
    exported: list[tuple[str, Any]],
    shared_engine: ScriptedEngine,
    tokenizer_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Fleet, str, str]]:
    """A fleet that exports traces, on a Redis with a password; the URLs of an API process and of a worker."""
    with (
        EmbeddedValkey() as valkey,
        receiver(exported) as collector,
        shared_engine.serve() as engine_url,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with fleet(valkey.url, engine_url, tokenizer_dir, tmp_path_factory.mktemp("logs")) as running:
            worker = running.assembler("--metrics-port", "0")
            _, api = running.api()
            found = re.search(r"metrics and probes at (http://[\d.:]+)", worker.output())
            assert found is not None
            yield running, api, found[1]


async def play(url: str, engine: ScriptedEngine) -> str:
    """One session with a turn, a collect, a refused request and an engine that fails; its id."""
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "authorization": "Bearer tt_s3cr3t"}
    user = {"role": "user", "content": CONTENT}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=30) as client:
        sid = (await client.post(f"{url}/sessions")).json()["session_id"]
        chat = f"{url}/sessions/{sid}/v1/chat/completions"
        assert (await client.post(chat, json={"messages": [user]})).status_code == 200
        assert (await client.post(chat, json={"messages": [{"content": CONTENT}]})).status_code == 400
        engine.answer = lambda body: httpx.Response(200, content=f"{{{CONTENT}".encode())
        assert (await client.post(chat, json={"messages": [user]})).status_code == 502
        engine.answer = None
        assert (await client.post(f"{url}/sessions/{sid}/samples", json={})).status_code == 200
    return str(sid)


def shown(url: str) -> dict[str, tuple[str, list[str]]]:
    """Name → type and labels, of the metrics that a process shows."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            sorted({label for sample in family.samples for label in sample.labels} - {"le"}),
        )
        for family in text_string_to_metric_families(text)
        if family.name.startswith("tokentape_")
    }


@pytest.mark.parametrize(
    ("process", "section"), [(1, "Metrics of an API process"), (2, "Metrics of a worker process")]
)
def test_a_scrape_shows_what_the_page_lists(
    observed: tuple[Fleet, str, str], process: int, section: str
) -> None:
    """A running process shows every metric of its table, with its type and labels, and no other."""
    text = sections(DOCS / "reference" / "telemetry.md")[section]
    listed = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            name, kind, labels, _ = (cell.strip() for cell in line.strip("|").split(" | ", 3))
            listed[name.strip("`")] = (kind, sorted(re.findall(r"`(\w+)`: ", labels)))
    assert list(listed) == rows(text)[1:]
    assert shown(str(observed[process])) == listed


async def test_one_trace_from_the_driver_to_the_worker(
    observed: tuple[Fleet, str, str], exported: list[tuple[str, Any]], engine: ScriptedEngine
) -> None:
    """A collect is one trace over both processes: the driver's span, `collect`, `assemble job`."""
    sid = await play(observed[1], engine)
    wait_until(lambda: {"collect", "assemble job"} <= {span.name for _, span in exported}, timeout_s=20)
    mine = [(service, span) for service, span in exported if span.trace_id.hex() == TRACE]
    found = {span.name: (service, span) for service, span in mine}
    assert found.keys() >= {"chat", "engine", "append", "collect", "assemble job"}
    (api, collect), (worker, assemble) = found["collect"], found["assemble job"]
    assert (api, worker) == ("tokentape-api", "tokentape-assembler")
    assert collect.parent_span_id.hex() == "b7ad6b7169203331"
    assert assemble.parent_span_id == collect.span_id
    assert {a.key: a.value.string_value for a in assemble.attributes}["tokentape.session"] == sid


async def test_no_secret_and_no_content_leaves_the_processes(
    observed: tuple[Fleet, str, str], exported: list[tuple[str, Any]], engine: ScriptedEngine
) -> None:
    """Redis's password, a bearer token and a message are in no log, no metric and no span."""
    running, api, worker = observed
    sid = await play(api, engine)
    wait_until(lambda: all(sid in process.output() for process in running.started), timeout_s=20)
    texts = [process.output() for process in running.started]
    async with httpx.AsyncClient(trust_env=False) as client:
        texts += [(await client.get(f"{url}/metrics")).text for url in (api, worker)]
    texts.append(str(exported))
    password = urlsplit(running.redis_url).password
    assert password
    for text in texts:
        assert not [secret for secret in (password, "s3cr3t", "Rumpelstilzchen") if secret in text]


async def test_logs_are_one_json_object_a_line(
    observed: tuple[Fleet, str, str], engine: ScriptedEngine
) -> None:
    """What is no terminal gets JSON: every line has a time, a level, a logger and an event."""
    running, api, _ = observed
    sid = await play(api, engine)

    def lines(process: Running) -> list[dict[str, Any]]:
        return [json.loads(line) for line in process.output().splitlines()]

    worker, server = running.started
    wait_until(lambda: sid in worker.output(), timeout_s=20)
    for line in (*lines(worker), *lines(server)):
        assert line.keys() >= {"timestamp", "level", "logger", "event"}
    [job] = [line for line in lines(worker) if line["event"] == "job" and line["session"] == sid]
    assert (job["outcome"], job["trace"], list(job["stages"])) == (
        "stored",
        TRACE,
        ["fold", "assemble", "encode"],
    )
    requests = [line for line in lines(server) if line["event"] == "request" and line.get("session") == sid]
    assert [line["status"] for line in requests] == [200, 400, 502, 200]
    assert list(requests[-1]["stages"]) == ["queue", "fold", "assemble", "encode"]


def test_console_lines(observed: tuple[Fleet, str, str]) -> None:
    """With `--log-format console` a line is for people, who read it where no terminal is: without colours."""
    running = observed[0]
    process, url = running.api("--log-format", "console")
    httpx.delete(f"{url}/sessions/none", trust_env=False)
    line = "none     request DELETE /sessions/{sid} 404 session_not_found"
    wait_until(lambda: line in process.output(), process)
    assert process.stop() == 0
    running.started.remove(process)
