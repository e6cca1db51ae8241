"""Trees over separate processes: hooks run in the worker's child, siblings reach the driver."""

import os
from typing import Any

import httpx
import pytest

from tests.integration.test_collect import chat
from tests.support.processes import Fleet
from tests.support.scripted import ScriptedEngine
from tokentape_contracts.samples import decode_samples

USER = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "And now?"}


async def open_tree(client: httpx.AsyncClient, url: str, **fields: Any) -> str:
    reply = await client.post(f"{url}/sessions", json={"mode": "tree", **fields})
    return f"{url}/sessions/{reply.json()['session_id']}"


async def test_siblings(urls: list[str], client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """Two branches of one turn are two samples; the shared turn is trained once; the reward comes back."""
    session = await open_tree(client, urls[0])
    first = await chat(client, session, USER)
    left = await chat(client, session, USER, first, {"role": "user", "content": "left"})
    await chat(client, session, USER, first, {"role": "user", "content": "left"}, left, AGAIN)
    await chat(client, session, USER, first, {"role": "user", "content": "right"})
    reply = await client.post(f"{session}/samples", json={"metadata": {"reward": 0.75, "task": "t"}})
    decoded = decode_samples(reply.content)
    assert [s["metadata"]["leaf"]["path_node_ids"] for s in decoded.samples] == [[0, 1, 2], [0, 3]]
    assert [s["reward"] for s in decoded.samples] == [0.75, 0.75]
    assert decoded.samples[0]["metadata"]["task"] == "t"
    assert [s["loss_mask"][0] for s in decoded.samples] == [1, 0]
    assert len(decoded.session_metadata["tree"]["nodes"]) == 4


@pytest.fixture
def with_hooks(system: Fleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a worker with hooks in place of the module's worker."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    started = []

    def start(*arguments: str) -> None:
        for running in system.started:
            if "assembler" in running.log.name and running.process.poll() is None:
                running.stop()
        started.append(system.assembler(*arguments))

    yield start
    for running in started:
        running.stop()
    system.assembler("--workers", "2")


async def test_own_hooks(urls: list[str], client: httpx.AsyncClient, with_hooks: Any) -> None:
    """Own pick and finish hooks decide what is kept and what it is worth."""
    with_hooks("--pick-hook", "tests.support.hooks.everything", "--finish-hook", "tests.support.hooks.rank")
    session = await open_tree(client, urls[0])
    first = await chat(client, session, USER)
    for side in ("left", "right"):
        await chat(client, session, USER, first, {"role": "user", "content": side})
    decoded = decode_samples((await client.post(f"{session}/samples", json={"metadata": {"k": 1}})).content)
    assert [s["reward"] for s in decoded.samples] == [0.0, 1.0]
    assert decoded.samples[0]["metadata"]["from_agent"] == {"k": 1}


async def test_a_hook_that_raises(urls: list[str], client: httpx.AsyncClient, with_hooks: Any) -> None:
    """A hook that raises is 422 with its name, every time."""
    with_hooks("--finish-hook", "tests.support.hooks.explode")
    session = await open_tree(client, urls[0])
    await chat(client, session, USER)
    for _ in range(2):
        reply = await client.post(f"{session}/samples")
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "hook_failed")
        assert "tests.support.hooks.explode raised RuntimeError" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("option", "path", "mention"),
    [
        ("--pick-hook", "tests.support.hooks.awaitable", "is async"),
        ("--finish-hook", "tests.support.hooks.missing", "missing"),
    ],
)
@pytest.mark.slow
def test_bad_hooks_refuse_the_start(
    system: Fleet, monkeypatch: pytest.MonkeyPatch, option: str, path: str, mention: str
) -> None:
    """A worker does not start with a missing or async hook; its message names it."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    running = system.tokentape(
        *("assembler", "--tokenizer", str(system.tokenizer), "--redis-url", system.redis_url, option, path)
    )
    assert running.process.wait(60) == 2
    assert path in running.output()
    assert mention in running.output()


@pytest.mark.slow
def test_a_bad_matcher_refuses_the_start(system: Fleet) -> None:
    """An API process does not start with a matcher that is not there."""
    running = system.tokentape(
        *("api", "--engine-url", system.engine_url, "--tokenizer", str(system.tokenizer)),
        *("--redis-url", system.redis_url, "--family", "qwen3", "--matcher", "no_such_package.match"),
    )
    assert running.process.wait(60) == 2
    assert "no_such_package.match" in running.output()
