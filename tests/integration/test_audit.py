"""INV-9 end to end: what processes delivered is assembled anew by the command, here and elsewhere."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import redis.asyncio

from tests.integration.test_collect import USER, chat, dialogue, open_session
from tests.integration.test_trees import AGAIN, open_tree
from tests.support.processes import Fleet
from tests.support.scripted import ScriptedEngine
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_cli.main import main
from tokentape_contracts import audit, keys
from tokentape_contracts.http import DIGEST_HEADER
from tokentape_contracts.samples import decode_samples
from tokentape_core.recording import dump, load

TOKENIZER = ("--tokenizer", "unused")

pytestmark = pytest.mark.slow


@pytest.fixture
async def redis_client(system: Fleet) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis.from_url(system.redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def elsewhere() -> Iterator[EmbeddedValkey]:
    """A colleague's empty server."""
    with EmbeddedValkey() as server:
        yield server


def sid(session: str) -> str:
    return session.rpartition("/")[2]


async def tree(client: httpx.AsyncClient, url: str) -> str:
    """A session with two branches."""
    session = await open_tree(client, url)
    first = await chat(client, session, USER)
    await chat(client, session, USER, first, AGAIN)
    await chat(client, session, USER, first, {"role": "user", "content": "right"})
    return session


async def collect(client: httpx.AsyncClient, session: str, contract: int = 1, **body: Any) -> str:
    """Collects; the digest that was delivered, as `replay` writes it."""
    reply = await client.post(
        f"{session}/samples", json=body, headers={"Accept-Contract": str(contract)}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    return reply.headers[DIGEST_HEADER]


async def replay(
    system: Fleet, what: str | Path, *more: str, redis_url: str | None = None
) -> tuple[int, str]:
    """Runs `tokentape replay`; its exit code and its output."""
    where = () if isinstance(what, Path) else ("--redis-url", redis_url or system.redis_url)
    running = system.tokentape(
        *("replay", str(what), "--tokenizer", str(system.tokenizer), "--family", system.family),
        *where,
        *more,
    )
    return await asyncio.to_thread(running.process.wait, 60), running.output()


async def command(*arguments: str | Path) -> int:
    """Runs a command that loads no tokenizer, in this process."""
    return await asyncio.to_thread(main, list(map(str, arguments)))


async def test_replay_equals_delivery(urls: list[str], client: httpx.AsyncClient, system: Fleet) -> None:
    """Linear and tree sessions, in both contracts, live and deleted: every digest is equal (INV-9)."""
    linear = await open_session(client, urls[0])
    messages = [USER]
    for _ in range(2):
        messages += [await chat(client, linear, *messages), USER]
    digests = [await collect(client, linear, contract) for contract in (1, 2)]
    await chat(client, linear.replace(urls[0], urls[1]), *messages)
    digests += [await collect(client, linear, 2, max_seq_len=20), await collect(client, linear, 1)]
    code, output = await replay(system, sid(linear), "--verify")
    assert code == 0, output
    lines = [line for line in output.splitlines() if line.startswith("ok ")]
    assert [line.split()[-1] for line in lines] == digests
    assert [line.split()[2] for line in lines] == ["tail=2-0", "tail=2-0", "tail=3-0", "tail=3-0"]
    assert (await client.delete(linear)).status_code == 204
    assert await replay(system, sid(linear), "--verify", "--at", "3") == (
        0,
        "".join(f"{line}\n" for line in lines[2:]),
    )

    branched = await tree(client, urls[0])
    digests = [
        await collect(client, branched, contract, metadata={"reward": 0.5, "task": "ä"})
        for contract in (1, 2)
    ]
    code, output = await replay(system, sid(branched), "--verify")
    assert (code, [line.split()[-1] for line in output.splitlines()]) == (0, digests)


@pytest.mark.slow
async def test_what_a_session_gives_at_a_turn(
    urls: list[str], client: httpx.AsyncClient, system: Fleet
) -> None:
    """Without --verify the samples at a turn are shown, with the digests of a collect without parameters."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 1)
    digests = [await collect(client, session, contract) for contract in (1, 2)]
    sample = decode_samples((await client.post(f"{session}/samples")).content).samples[0]
    await dialogue(client, session, 1)
    code, output = await replay(system, sid(session), "--at", "1")
    tokens, response = len(sample["tokens"]), sample["response_length"]
    assert (code, output.splitlines()) == (
        0,
        [
            f"session {sid(session)} at 1-0",
            f"contract 1: {digests[0]}",
            f"contract 2: {digests[1]}",
            "samples: 1",
            f"sample 0: completed, {tokens} tokens, {response} of them response",
        ],
    )


@pytest.mark.slow
async def test_a_refusal_is_replayed(
    urls: list[str], client: httpx.AsyncClient, system: Fleet, redis_client: redis.asyncio.Redis
) -> None:
    """An assembly that was refused is refused again for the same reason, also from a file."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 2)
    await redis_client.xdel(keys.events(sid(session)), "1-0")
    refused = await client.post(f"{session}/samples")
    assert refused.json()["error"]["code"] == "stream_corrupt"
    code, output = await replay(system, sid(session), "--verify")
    assert (code, output.split(maxsplit=4)[4].strip()) == (
        0,
        f"stream_corrupt: {refused.json()['error']['message']}",
    )


@pytest.mark.slow
async def test_what_was_changed_differs(
    urls: list[str],
    client: httpx.AsyncClient,
    system: Fleet,
    redis_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A changed result, audit entry or event, another hook or family: DIFFERS, exit code 1 and why."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    session = await tree(client, urls[0])
    digest = await collect(client, session, 1)
    audit_key, events_key = keys.audit(sid(session)), keys.events(sid(session))
    [(entry_id, fields)] = await redis_client.xrange(audit_key)
    result_key = keys.samples(sid(session), audit.decode(fields).request)

    for option, cause in {
        ("--finish-hook", "tests.support.hooks.rank"): "Another finish hook",
        ("--family", "default"): "Another tokenizer, chat template or family",
    }.items():
        code, output = await replay(system, sid(session), "--verify", *option)
        assert (code, output.split()[0]) == (1, "DIFFERS")
        assert f"delivered: {digest}" in output
        assert cause in output
        assert "were changed" not in output

    payload = await redis_client.hget(result_key, "0")  # type: ignore[misc]
    await redis_client.hset(result_key, "0", payload[:-1] + b"?")  # type: ignore[misc]
    code, output = await replay(system, sid(session), "--verify")
    assert (code, output.split()[0]) == (1, "DIFFERS")
    assert f"replayed: {digest}" in output
    assert "The result in Redis is not the one in the audit" in output
    await redis_client.delete(result_key)

    for changes, cause in (
        ({"digest": "0" * 64}, "audit entry were changed"),
        ({"metadata": {"reward": 2.0}}, "its parameters are not its request's"),
        ({"tail": 1}, "cannot be read"),
    ):
        json = orjson.dumps({**orjson.loads(fields[b"json"]), **changes})
        await redis_client.delete(audit_key)
        await redis_client.xadd(audit_key, {**fields, b"json": json}, id=entry_id)
        code, output = await replay(system, sid(session), "--verify")
        assert (code, output.split()[0]) == (1, "DIFFERS")
        assert cause in " ".join(output.split())

    await redis_client.delete(audit_key)
    await redis_client.xadd(audit_key, fields, id=entry_id)
    rows = await redis_client.xrange(events_key)
    await redis_client.delete(events_key)
    for event_id, event in rows:
        if event_id == b"3-0":
            event[b"logprobs"] = bytes(len(event[b"logprobs"]))
        await redis_client.xadd(events_key, event, id=event_id)
    code, output = await replay(system, sid(session), "--verify")
    assert (code, output.split()[0]) == (1, "DIFFERS")
    assert "the events, their routing replay rows" in output


@pytest.mark.slow
async def test_a_case_for_a_colleague(
    urls: list[str],
    client: httpx.AsyncClient,
    system: Fleet,
    elsewhere: EmbeddedValkey,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exported sessions replay from the file and, once imported, on another server, with equal digests."""
    linear = await open_session(client, urls[0])
    await dialogue(client, linear, 12)
    branched = await tree(client, urls[0])
    digests = {await collect(client, linear, 1), await collect(client, linear, 2)}
    digests.add(await collect(client, branched, 2, metadata={"reward": 1}))
    await client.delete(branched)
    file = tmp_path / "case.tokentape"
    ids = (sid(linear), sid(branched))
    assert await command("export", *ids, "--redis-url", system.redis_url, "--output", file) == 0
    assert os.listdir(tmp_path) == [file.name]

    code, output = await replay(system, file, "--verify")
    assert (code, {line.split()[-1] for line in output.splitlines()}) == (0, digests)
    for expected in ("written", "was there already, the same"):
        capsys.readouterr()
        assert await command("import", file, "--redis-url", elsewhere.url) == 0
        assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"{each}: {expected}" for each in ids)
    assert await command("import", file, "--redis-url", system.redis_url) == 0

    found = set()
    for session_id in ids:
        code, output = await replay(system, session_id, "--verify", redis_url=elsewhere.url)
        assert code == 0
        found |= {line.split()[-1] for line in output.splitlines()}
    assert found == digests
    again = tmp_path / "again.tokentape"
    assert await command("export", *ids, "--redis-url", elsewhere.url, "--output", again) == 0
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.slow
async def test_a_session_with_replay_rows(
    system: Fleet,
    urls: list[str],
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    elsewhere: EmbeddedValkey,
    tmp_path: Path,
) -> None:
    """Routing replay rows, stored without repeats, are in the file and give the same samples elsewhere."""
    engine.experts = (2, 3)
    running, url = await asyncio.to_thread(system.api, "--replay", "full", "--replay-layers", "2")
    try:
        session = await open_session(client, url)
        await dialogue(client, session, 3)
        digests = [await collect(client, session, contract) for contract in (1, 2)]
    finally:
        engine.experts = None
        running.stop()
    file = tmp_path / "case.tokentape"
    assert await command("export", sid(session), "--redis-url", system.redis_url, "--output", file) == 0
    assert await command("import", file, "--redis-url", elsewhere.url) == 0
    code, output = await replay(system, sid(session), "--verify", redis_url=elsewhere.url)
    assert (code, [line.split()[-1] for line in output.splitlines()]) == (0, digests)


@pytest.mark.slow
async def test_a_stream_that_was_changed(
    urls: list[str], client: httpx.AsyncClient, system: Fleet, tmp_path: Path
) -> None:
    """Of log-probs that are none the verdict is a sentence, and no traceback."""
    session = await open_session(client, urls[0])
    await dialogue(client, session, 1)
    await collect(client, session)
    file = tmp_path / "case.tokentape"
    assert await command("export", sid(session), "--redis-url", system.redis_url, "--output", file) == 0
    (recording,) = load(file.read_bytes())
    fields = recording.events[1][1]
    fields[b"logprobs"] = np.full(len(fields[b"logprobs"]) // 8, np.nan).tobytes()
    file.write_bytes(dump([recording]))
    code, output = await replay(system, file, "--verify")
    assert code == 1
    assert "DIFFERS" in output
    assert "replayed: stream_corrupt: token 0 of the response has the log-prob nan" in output
    assert "Traceback" not in output


@pytest.mark.slow
async def test_what_cannot_be_imported(
    urls: list[str],
    client: httpx.AsyncClient,
    system: Fleet,
    elsewhere: EmbeddedValkey,
    redis_client: redis.asyncio.Redis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A damaged file, a session with a hole and one of other content are refused, and nothing is written."""
    sessions = [await open_session(client, urls[0]) for _ in range(2)]
    for session in sessions:
        await dialogue(client, session, 1)
    ids = [sid(session) for session in sessions]
    file, damaged, holed = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    here, there = ("--redis-url", system.redis_url), ("--redis-url", elsewhere.url)
    assert await command("export", *ids, *here, "--output", file) == 0
    damaged.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert await command("import", damaged, *there) == 1
    assert "damaged" in capsys.readouterr().err

    assert await command("import", file, *there) == 0
    await dialogue(client, sessions[1], 1)
    assert await command("import", file, *here) == 1
    assert f"session {ids[1]} is there already, with other content" in capsys.readouterr().err

    await redis_client.xdel(keys.events(ids[1]), "1-0")
    assert await command("export", *ids, *here, "--output", holed) == 0
    assert "it can be replayed, but not imported" in capsys.readouterr().err
    with EmbeddedValkey() as empty:
        assert await command("import", holed, "--redis-url", empty.url) == 1
        assert "does not follow" in capsys.readouterr().err
        async with redis.asyncio.Redis.from_url(empty.url) as colleague:
            assert await colleague.dbsize() == 0


@pytest.mark.slow
async def test_wrong_usage(
    urls: list[str],
    client: httpx.AsyncClient,
    system: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where nothing can be compared or transferred the exit code is 2, with the reason."""
    here = ("--redis-url", system.redis_url)
    foreign = tmp_path / "foreign"
    foreign.write_text("not one of ours")
    session = sid(await open_session(client, urls[0]))
    for arguments, reason in (
        (("replay", "nobody", *here, *TOKENIZER), "there is no session nobody"),
        (("replay", "nobody", *TOKENIZER), "--redis-url is needed"),
        (("replay", session, *here), "--tokenizer is needed"),
        (("replay", session, *here, *TOKENIZER, "--at", "1"), "has 0 turns, and none 1"),
        (("replay", foreign, *TOKENIZER), "not a file of Tokentape"),
        (("export", "nobody", *here, "--output", tmp_path / "x"), "there is no session nobody"),
        (("import", tmp_path / "missing", *here), "No such file"),
        (("import", foreign), "--redis-url is needed"),
    ):
        assert await command(*arguments) == 2
        assert reason in capsys.readouterr().err
    code, output = await replay(system, session, "--verify")
    assert code == 2
    assert "no delivery is in its audit" in output
    code, output = await replay(system, session, "--tokenizer", "/nowhere")
    assert code == 2
    assert "/nowhere" in output


def test_the_archive_url_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """`config` shows an archive without its password, and an option that is no URL is refused."""
    assert main(["config", "--archive-url", "ftp://user:secret@host/x"]) == 0
    assert "ftp://user:***@host/x" in capsys.readouterr().out
    assert main(["config", "--archive-url", "/data"]) == 2
