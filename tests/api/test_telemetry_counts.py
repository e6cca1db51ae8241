"""What an API process counts: tokens and routing replay rows of turns, lookups, collects, the queue."""

import logging
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import fakeredis
import httpx
import pytest
import redis.asyncio

from tests.api.conftest import OpenSession
from tests.api.test_telemetry import Series, scrape, value
from tests.support.application import client_of
from tests.support.scripted import ScriptedEngine, network
from tests.text.models import small_renderer as renderer_of
from tokentape_api import telemetry
from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import SGLangEngine
from tokentape_api.settings import ApiSettings
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import ReplayBroken
from tokentape_contracts.events import OPENED_ID
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.jobs import JobResult
from tokentape_core.domain.replay import KINDS
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer, NotAppendable, Prompt
from tokentape_core.text.tokenizer import Tokenizer

LAYERS, CHOICES, ENTRIES = 3, 2, 4
ROW_BYTES = {"routed_experts": LAYERS * CHOICES, "indexer_topk": ENTRIES}
"""The scripted numbers fit into a byte."""
TEMPLATES = {"qwen3": "qwen3_training", "glm4": "glm4moe"}
USER = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "And now?"}


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> ApiSettings:
    """The parameter, if there is one, has what differs from the usual ones."""
    changes = getattr(request, "param", {})
    usual = ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3")
    return replace(usual, **changes)


@pytest.fixture
def renderer(settings: ApiSettings) -> ChatRenderer:
    return renderer_of(TEMPLATES[settings.family], settings.family)


@pytest.fixture
def tokenizer(renderer: ChatRenderer) -> Tokenizer:
    return renderer.tokenizer


@pytest.fixture
def server() -> fakeredis.FakeServer:
    return fakeredis.FakeServer()


@pytest.fixture
async def worker(server: fakeredis.FakeServer) -> AsyncIterator[redis.asyncio.Redis]:
    """A client with which a test plays the worker."""
    client = fakeredis.FakeAsyncRedis(server=server)
    yield client
    await client.aclose()


@pytest.fixture
async def api(
    settings: ApiSettings,
    engine: ScriptedEngine,
    store: MemoryStore,
    renderer: ChatRenderer,
    server: fakeredis.FakeServer,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, whose queue is on the test's server."""
    queue, reader = (fakeredis.FakeAsyncRedis(server=server) for _ in range(2))
    app = build_app(
        settings,
        store=store,
        engine=SGLangEngine(settings.engine_url, timeout_s=1.0, **network(engine.handle)),
        renderer=renderer,
        collector=Collector(queue, reader, queue),
    )
    async with client_of(app) as client:
        yield client


def by_label(series: Series, name: str, label: str, values: tuple[str, ...]) -> dict[str, float]:
    """Label value → count."""
    return {each: value(series, name, **{label: each}) for each in values}


async def dialogue(session: OpenSession, turns: int) -> list[dict[str, Any]]:
    """So many turns, each of which continues the one before; the messages."""
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        reply = await session.chat(*messages, USER)
        assert reply.status_code == 200, reply.text
        messages += [USER, reply.json()["choices"][0]["message"]]
    return messages


@pytest.mark.parametrize("settings", [{"family": "glm4"}], indirect=True, ids=["glm4"])
async def test_tokens_of_continued_turns(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine
) -> None:
    """A sampled opener that the next prompt brings anew is trimmed; all other tokens count by kind."""
    endings = ["<|user|>", "", "<|observation|>", "<|user|>"]
    outputs = [engine.tokenizer.encode(f"fine{ending}") for ending in endings]

    def answer(body: dict[str, Any]) -> httpx.Response:
        output = outputs[len(engine.bodies) - 1]
        triples = [[-0.5, token, None] for token in output]
        meta = {"completion_tokens": len(output), "output_token_logprobs": triples}
        return httpx.Response(200, json=engine.reply(body, "fine", meta=meta))

    engine.answer = answer
    await dialogue(session, len(endings))
    series = await scrape(api)
    prompts = [len(body["input_ids"]) for body in engine.bodies]
    reused = sum(prompts[:-1]) + sum(map(len, outputs[:-1])) - 2
    assert value(series, "turns_trimmed_tokens_total") == 2
    assert by_label(series, "turns_tokens_total", "kind", telemetry.TOKENS) == {
        "reused": reused,
        "rendered": sum(prompts) - reused,
        "sampled": sum(map(len, outputs)),
    }


@pytest.mark.parametrize("settings", [{"mode": "tree"}], indirect=True)
async def test_a_root_that_the_template_cannot_append(
    api: httpx.AsyncClient, session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as such a root and not as an unmatched one; nothing of the turn before it is reused."""
    messages = await dialogue(session, 1)
    roots = by_label(await scrape(api), "turns_roots_total", "reason", telemetry.ROOTS)
    assert roots == {"first": 1, "unmatched": 0, "head_changed": 0, "not_appendable": 0}

    def refuse(*_: Any, **__: Any) -> Prompt:
        raise NotAppendable("no")

    monkeypatch.setattr(ChatRenderer, "extend", refuse)
    assert (await session.chat(*messages, AGAIN)).status_code == 200
    after = await scrape(api)
    roots = by_label(after, "turns_roots_total", "reason", telemetry.ROOTS)
    assert roots == {"first": 1, "unmatched": 0, "head_changed": 0, "not_appendable": 1}
    assert value(after, "turns_tokens_total", kind="reused") == 0
    assert value(after, "turns_trimmed_tokens_total") == 0


async def test_a_retried_first_turn_is_an_unmatched_root(
    api: httpx.AsyncClient, session: OpenSession
) -> None:
    """In a linear session, too, only the first turn of all is the first root."""
    await dialogue(session, 1)
    assert (await session.chat(USER)).status_code == 200
    roots = by_label(await scrape(api), "turns_roots_total", "reason", telemetry.ROOTS)
    assert roots == {"first": 1, "unmatched": 1, "head_changed": 0, "not_appendable": 0}


REPLAY = [{"replay": rows, "replay_layers": LAYERS, "indexer_topk": "on"} for rows in ("full", "incremental")]


@pytest.mark.parametrize("settings", REPLAY, indirect=True, ids=["full", "incremental"])
async def test_replay_rows(
    api: httpx.AsyncClient, session: OpenSession, engine: ScriptedEngine, settings: ApiSettings
) -> None:
    """Rows count as often as they are sent, and as stored once; a payload that does not come is missing."""
    engine.experts, engine.indexer = (LAYERS, CHOICES), (1, ENTRIES)
    messages = await dialogue(session, 2)
    series = await scrape(api)
    answered = len(engine.tokenizer.encode("fine<|im_end|>"))
    first, second = (len(body["input_ids"]) + answered - 1 for body in engine.bodies)
    sent = {"routed_experts": first + second, "indexer_topk": first + second}
    if settings.replay == "incremental":
        sent["routed_experts"] = second
    stored = dict.fromkeys(KINDS, second)
    assert by_label(series, "replay_rows_total", "kind", KINDS) == sent
    assert by_label(series, "replay_stored_rows_total", "kind", KINDS) == stored
    assert by_label(series, "replay_stored_bytes_total", "kind", KINDS) == {
        kind: second * size for kind, size in ROW_BYTES.items()
    }
    assert by_label(series, "replay_missing_total", "kind", KINDS) == dict.fromkeys(KINDS, 0)

    engine.experts = None
    assert (await session.chat(*messages, AGAIN)).status_code == 200
    engine.indexer = None
    assert (await session.chat(*messages, AGAIN)).status_code == 200
    series = await scrape(api)
    assert by_label(series, "replay_missing_total", "kind", KINDS) == {
        "routed_experts": 2,
        "indexer_topk": 1,
    }
    assert value(series, "replay_rows_total", kind="routed_experts") == sent["routed_experts"]


async def test_a_session_without_replay_misses_nothing(api: httpx.AsyncClient, session: OpenSession) -> None:
    """What the engine was not asked for is not missing."""
    await dialogue(session, 1)
    series = await scrape(api)
    for name in ("rows", "stored_rows", "stored_bytes", "missing"):
        assert by_label(series, f"replay_{name}_total", "kind", KINDS) == dict.fromkeys(KINDS, 0)


async def test_lookups_of_the_cache(api: httpx.AsyncClient, session: OpenSession) -> None:
    """A session that the process sees for the first time is a miss, later a hit; one that is none, a miss."""
    seen = []
    for url in (session.url, session.url, "/sessions/unknown", "/sessions/unknown", session.url):
        await api.get(url)
        series = await scrape(api)
        found = by_label(series, "cache_lookups_total", "result", ("hit", "miss"))
        seen.append((found["hit"], found["miss"]))
    assert seen == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 3)]
    await dialogue(session, 2)
    series = await scrape(api)
    assert by_label(series, "cache_lookups_total", "result", ("hit", "miss")) == {"hit": 4, "miss": 3}
    assert value(series, "cache_sessions") == 1


async def test_the_queue(
    api: httpx.AsyncClient, worker: redis.asyncio.Redis, server: fakeredis.FakeServer
) -> None:
    """A scrape shows the jobs of all processes as they are at that moment, and NaN without Redis."""
    assert value(await scrape(api), "queue_jobs") == 0
    await worker.zadd(keys.QUEUE, {"a": 1, "b": 2, "c": 3})
    assert value(await scrape(api), "queue_jobs") == 3
    await worker.zrem(keys.QUEUE, "b")
    assert value(await scrape(api), "queue_jobs") == 2
    server.connected = False
    assert math.isnan(value(await scrape(api), "queue_jobs"))
    server.connected = True
    assert value(await scrape(api), "queue_jobs") == 2


async def collect(
    session: OpenSession, worker: redis.asyncio.Redis, result: JobResult, max_seq_len: int
) -> httpx.Response:
    """Collects the session, which has no turns, when a worker has stored this result."""
    digest = SamplesRequest(max_seq_len).digest(OPENED_ID, 1)
    key = keys.samples(session.url.rpartition("/")[2], digest)
    fields = {name: bytes(part) for name, part in result.to_hash()}
    await worker.hset(key, mapping=fields)  # type: ignore[misc]
    return await session.api.post(f"{session.url}/samples", json={"max_seq_len": max_seq_len})


async def test_collects(
    session: OpenSession,
    worker: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Samples count with all their bytes, and with the wait: what the worker's stages do not account for."""
    caplog.set_level(logging.INFO, "tokentape.api")
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", 4)
    waited = await collect(session, worker, JobResult(b"0123456789", "hex", {}), 1)
    series = await scrape(session.api)
    name, _, ms = waited.headers["server-timing"].partition(";dur=")
    assert (waited.content, name) == (b"0123456789", "queue")
    assert value(series, "collect_outcomes_total", outcome="samples") == 1
    assert value(series, "collect_payload_bytes_total") == 10
    assert value(series, "collect_wait_seconds_count") == 1
    assert value(series, "collect_wait_seconds_sum") == pytest.approx(float(ms) / 1000, abs=0.00001)
    assert value(series, "collect_wait_seconds_sum") > 0

    timing = {"fold": 1e6, "assemble": 1.0, "encode": 1.0}
    assert (await collect(session, worker, JobResult(b"abc", "hex", timing), 2)).content == b"abc"
    after = await scrape(session.api)
    assert value(after, "collect_outcomes_total", outcome="samples") == 2
    assert value(after, "collect_payload_bytes_total") == 13
    assert value(after, "collect_wait_seconds_count") == 2
    assert value(after, "collect_wait_seconds_sum") == value(series, "collect_wait_seconds_sum")
    first, second = (line.__dict__["fields"] for line in caplog.records if "fields" in line.__dict__)
    assert (first["bytes"], list(first["stages"])) == (10, ["queue"])
    assert (second["bytes"], second["stages"]) == (3, {"queue": 0, **timing})


async def test_a_refused_collect(session: OpenSession, worker: redis.asyncio.Redis) -> None:
    """A stored error counts under its code; it has neither bytes nor a wait."""
    broken = JobResult(b"", "", {"fold": 1.0}, ReplayBroken("turn 2: rows 3 to 5 are missing"))
    assert (await collect(session, worker, broken, 1)).status_code == 422
    series = await scrape(session.api)
    assert value(series, "collect_outcomes_total", outcome="replay_broken") == 1
    assert value(series, "collect_outcomes_total", outcome="samples") == 0
    assert value(series, "collect_payload_bytes_total") == 0
    assert value(series, "collect_wait_seconds_count") == 0
