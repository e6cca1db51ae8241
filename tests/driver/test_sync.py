"""`SyncClient`: the same promises without an event loop."""

import asyncio
import concurrent.futures
import threading
import time
from typing import Any

import httpx
import pytest

from tests.driver.fake import BASE_URL, TOKENS, FakeServer, TrainerSample, hang
from tokentape_contracts.errors import PrefixBroken, error_body
from tokentape_driver import RolloutSample, SyncClient


async def idle(base_url: str, sample: Any) -> None:
    """An agent that does nothing."""


def test_open_collect_delete() -> None:
    """A session is opened, collected and deleted without an event loop of the caller."""
    server = FakeServer()
    with SyncClient(BASE_URL, transport=server.transport) as client:
        session = client.open_session(labels={"a": 1})
        collected = client.collect_samples(session, TrainerSample(index=1), metadata={"m": 1})
        client.delete(session)
    assert (collected.samples[0].tokens, collected.samples[0].metadata["m"]) == (TOKENS, 1)
    assert server.calls[1:] == ["POST /sessions/s1/samples", "DELETE /sessions/s1", "DELETE /sessions/s1"]


def test_rollout_and_errors() -> None:
    """An episode can be played, and its errors are raised in the caller's thread."""
    server = FakeServer()
    with SyncClient(BASE_URL, transport=server.transport) as client:
        assert client.rollout(idle, RolloutSample(), max_seq_len=9).tokens == TOKENS
        server.samples = httpx.Response(422, json=error_body(PrefixBroken("turn 2")))
        with pytest.raises(PrefixBroken, match="turn 2"):
            client.rollout(idle, RolloutSample())


async def test_where_another_loop_runs() -> None:
    """It works in the thread of a running event loop and in others at the same time."""
    server = FakeServer()
    with SyncClient(BASE_URL, transport=server.transport) as client:
        here = client.rollout(idle, RolloutSample())
        there = await asyncio.gather(
            *(asyncio.to_thread(client.rollout, idle, RolloutSample(index=i)) for i in range(8))
        )
    assert here.tokens == TOKENS
    assert [sample.index for sample in there] == list(range(8))


def test_on_its_own_loop() -> None:
    """A call from an agent on the private loop is refused instead of waiting for ever."""
    with SyncClient(BASE_URL, transport=FakeServer().transport) as client:

        async def agent(base_url: str, sample: Any) -> None:
            client.open_session()

        result = client.rollout(agent, RolloutSample())
    assert result.metadata["agent_error"].startswith("RuntimeError: SyncClient was called on its own")


def test_close_cancels_what_runs() -> None:
    """Closing cancels a waiting call, whose session is deleted, ends the thread, and may be repeated."""
    server = FakeServer(samples=hang)
    client = SyncClient(BASE_URL, transport=server.transport)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.rollout, idle, RolloutSample())
        while len(server.calls) < 2:
            time.sleep(0.001)
        client.close()
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result()
    client.close()
    assert server.calls[-1] == "DELETE /sessions/s1"
    assert "tokentape-client" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        client.open_session()
