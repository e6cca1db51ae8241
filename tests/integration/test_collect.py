"""Collecting over separate processes and a real server."""

import asyncio
import hashlib
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import psutil
import pytest

from deploy.sizing import CHILDREN, connections
from tests.support.processes import Fleet
from tests.support.scripted import ScriptedEngine
from tokentape_contracts import jobs, keys, limits
from tokentape_contracts.samples import decode_samples
from tokentape_core.store import connect
from tokentape_driver import RolloutSample, TokentapeClient

USER = {"role": "user", "content": "Hello"}


async def open_session(client: httpx.AsyncClient, url: str) -> str:
    return f"{url}/sessions/{(await client.post(f'{url}/sessions')).json()['session_id']}"


async def chat(client: httpx.AsyncClient, session: str, *messages: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post(f"{session}/v1/chat/completions", json={"messages": list(messages)})
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


async def dialogue(client: httpx.AsyncClient, session: str, turns: int) -> None:
    messages = [USER]
    for _ in range(turns):
        messages += [await chat(client, session, *messages), USER]


async def test_sample_is_what_the_engine_received_and_produced(
    urls: list[str], client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """One POST, one DELETE: the sample's tokens are the engine's last prompt and its answer, to the id."""
    engine.texts = ["one", "two", "three"]
    async with TokentapeClient(urls[0]) as driver:
        session = await driver.open_session()
        await dialogue(client, session.url, 3)
        collected = await session.collect_samples(RolloutSample(index=3))
    (sample,) = collected.samples
    answers = [engine.tokenizer.encode(f"{text}<|im_end|>") for text in ("one", "two", "three")]
    assert sample.tokens == engine.bodies[-1]["input_ids"] + answers[-1]
    masked_in = [
        token
        for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
        if mask
    ]
    assert masked_in == [token for answer in answers for token in answer]
    assert sample.status is not None
    assert sample.status.value == "completed"
    assert sample.metadata["max_trim_tokens"] == 0
    gone = await client.get(session.url)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_deleted")


async def test_any_process_serves_any_session(urls: list[str], client: httpx.AsyncClient) -> None:
    """Turns of one session go through both API processes in turn, and either collects them (INV-4)."""
    first = await open_session(client, urls[0])
    second = first.replace(urls[0], urls[1])
    messages = [USER]
    for number in range(6):
        messages += [await chat(client, (first, second)[number % 2], *messages), USER]
    payloads = [(await client.post(f"{url}/samples")).content for url in (first, second)]
    assert payloads[0] == payloads[1]
    lifecycle = decode_samples(payloads[0]).samples[0]["metadata"]["lifecycle"]
    assert [turn["turn"] for turn in lifecycle] == [1, 2, 3, 4, 5, 6]


async def test_equal_requests_share_one_result(urls: list[str], client: httpx.AsyncClient) -> None:
    """Sixteen equal requests through both processes get the same bytes, with their digest."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 2)
    replies = await asyncio.gather(
        *(client.post(f"{session.replace(urls[0], urls[i % 2])}/samples") for i in range(16))
    )
    assert {reply.status_code for reply in replies} == {200}
    (payload,) = {reply.content for reply in replies}
    digest = hashlib.sha256(payload).hexdigest()
    assert {reply.headers["Tokentape-Digest"] for reply in replies} == {f"sha-256={digest}"}
    assert {reply.headers["Tokentape-Contract"] for reply in replies} == {"1"}
    timing = replies[0].headers["Server-Timing"]
    assert [stage.split(";")[0] for stage in timing.split(", ")] == ["queue", "fold", "assemble", "encode"]


async def test_contract_two(urls: list[str], client: httpx.AsyncClient) -> None:
    """A client that reads contract 2 gets it, smaller and with the same content."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 3)
    one = await client.post(f"{session}/samples")
    two = await client.post(f"{session}/samples", headers={"Accept-Contract": "1, 2"})
    assert two.headers["Tokentape-Contract"] == "2"
    assert len(two.content) < len(one.content)
    first, second = decode_samples(one.content), decode_samples(two.content, contract=2)
    assert first == second


async def test_max_seq_len(urls: list[str], client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """A sample is cut at max_seq_len, and empty if not even the first prompt fits."""
    engine.texts = ["a long enough answer"]
    session = await open_session(client, urls[0])
    await chat(client, session, USER)
    prompt = len(engine.bodies[0]["input_ids"])
    cut = await client.post(f"{session}/samples", json={"max_seq_len": prompt + 2})
    (sample,) = decode_samples(cut.content).samples
    assert (len(sample["tokens"]), sample["status"].value) == (prompt + 2, "truncated")
    empty = await client.post(f"{session}/samples", json={"max_seq_len": prompt})
    reply = decode_samples(empty.content)
    assert (reply.samples, reply.empty_reason) == ([], "all_truncated")


async def test_no_turns(urls: list[str], client: httpx.AsyncClient) -> None:
    """A session without turns is 200 with `no_records`, and DELETE before any turn is 204."""
    session = await open_session(client, urls[0])
    reply = decode_samples((await client.post(f"{session}/samples")).content)
    assert (reply.samples, reply.empty_reason) == ([], "no_records")
    assert reply.session_metadata["accumulated_token_ids"] == []
    assert (await client.delete(session)).status_code == 204


async def test_concurrent_deletes(urls: list[str], client: httpx.AsyncClient) -> None:
    """Deletes that race through both processes all succeed (INV-8)."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 1)
    replies = await asyncio.gather(*(client.delete(session.replace(urls[0], urls[i % 2])) for i in range(8)))
    assert {reply.status_code for reply in replies} == {204}


@pytest.mark.parametrize("round_number", range(5))
async def test_delete_cannot_race_a_collect(
    urls: list[str], client: httpx.AsyncClient, round_number: int
) -> None:
    """A collect that was accepted before a DELETE returns its sample; one that came later is told so."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 3)
    collect = asyncio.create_task(client.post(f"{session}/samples"))
    await asyncio.sleep(0.001 * round_number)
    deleted = await client.delete(session.replace(urls[0], urls[1]))
    reply = await collect
    assert deleted.status_code == 204
    if reply.status_code == 200:
        assert len(decode_samples(reply.content).samples[0]["metadata"]["lifecycle"]) == 3
    else:
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_deleted")


async def test_a_client_that_goes_away_holds_no_worker(
    urls: list[str], client: httpx.AsyncClient, system: Any
) -> None:
    """A driver that hangs up before its collect is ready leaves no job behind."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 2)
    (worker,) = [running for running in system.started if "assembler" in running.log.name][-1:]
    assert worker.stop() == 0
    with pytest.raises(httpx.ReadTimeout):
        await client.post(f"{session}/samples", json={"deadline_s": 60}, timeout=0.5)
    redis = connect(system.redis_url)
    pattern = f"tt:{{{session.rpartition('/')[2]}}}:waiters:*"
    async with asyncio.timeout(5):
        while [key async for key in redis.scan_iter(pattern)] or await redis.zcard(keys.QUEUE):
            await asyncio.sleep(0.05)
    await redis.aclose()
    await asyncio.to_thread(system.assembler, "--workers", "2")


async def test_delete_while_a_collect_waits(
    urls: list[str], client: httpx.AsyncClient, system: Any, tokenizer_dir: Any
) -> None:
    """With no worker free, a collect is accepted, then the session deleted: the worker still assembles it."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 2)
    (worker,) = [running for running in system.started if "assembler" in running.log.name][-1:]
    assert worker.stop() == 0
    collect = asyncio.create_task(client.post(f"{session}/samples", json={"deadline_s": 25}))
    await asyncio.sleep(0.3)
    assert (await client.delete(session)).status_code == 204
    await asyncio.to_thread(system.assembler, "--workers", "2")
    reply = await collect
    assert reply.status_code == 200
    assert len(decode_samples(reply.content).samples[0]["metadata"]["lifecycle"]) == 2


async def test_a_body_that_is_cut_off(urls: list[str], client: httpx.AsyncClient, system: Any) -> None:
    """A result that is lost while it is sent ends the connection early, and counts as what it is."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 1)
    whole = await client.post(f"{session}/samples")
    redis = connect(system.redis_url)
    ((key, head),) = [
        (key, orjson.loads(await redis.hget(key, jobs.HEAD)))
        async for key in redis.scan_iter(f"tt:{{{session.rpartition('/')[2]}}}:samples:*")
    ]
    missing = {**head, "size": limits.STORE_VALUE_BYTES + 1, "parts": 2}
    await redis.hset(key, jobs.HEAD, orjson.dumps(missing))
    await redis.aclose()
    short = f"received {len(whole.content)} bytes, expected {missing['size']}"
    with pytest.raises(httpx.RemoteProtocolError, match=short):
        await client.post(f"{session}/samples")
    counted = (await client.get(f"{urls[0]}/metrics")).text.splitlines()
    assert 'tokentape_api_errors_total{code="store_unavailable"} 1.0' in counted
    assert 'tokentape_api_errors_total{code="internal_error"} 0.0' in counted
    lines = [line for line in system.started[0].output().splitlines() if "store_unavailable" in line]
    assert [json.loads(line)["level"] for line in lines] == ["warning"]


async def test_a_worker_has_few_connections(
    urls: list[str], client: httpx.AsyncClient, system: Fleet
) -> None:
    """After many collects at once a worker has no more to Redis than the page about sizes reckons with."""
    sessions = [await open_session(client, urls[0]) for _ in range(12)]
    for _ in range(3):
        await asyncio.gather(*(chat(client, session, USER) for session in sessions))
        replies = await asyncio.gather(*(client.post(f"{session}/samples") for session in sessions))
        assert {reply.status_code for reply in replies} == {200}
    workers = [running for running in system.started if running.log.name.startswith("assembler")]
    (process,) = (psutil.Process(each.process.pid) for each in workers if each.process.poll() is None)
    found = [
        connection
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("tcp")
        if connection.raddr and connection.raddr.port == urlsplit(system.redis_url).port
    ]
    assert CHILDREN < len(found) <= connections(0, 1)
