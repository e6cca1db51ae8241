"""Routing replay rows through real processes: a turn of a hundred megabytes, and a reply as large."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import redis.asyncio

from tests.support.processes import Fleet
from tests.support.scripted import ScriptedEngine, replay_rows
from tokentape_contracts import keys, limits
from tokentape_core.store import connect
from tokentape_driver import RolloutSample, TokentapeClient

LAYERS, CHOICES = 480, 64
"""Rows so wide that some 850 tokens make 100 MB."""
WORDS = "word " * 850

pytestmark = pytest.mark.slow


@pytest.fixture
def url(system: Fleet, engine: ScriptedEngine) -> str:
    engine.experts = (LAYERS, CHOICES)
    system.assembler()
    return system.api("--replay", "full", "--replay-layers", str(LAYERS))[1]


@pytest.fixture
async def client(system: Fleet) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(system.redis_url)
    yield client
    await client.aclose()


@pytest.mark.slow
async def test_a_turn_of_a_hundred_megabytes(url: str, client: redis.asyncio.Redis) -> None:
    """It is recorded and collected to the last number while `/health` answers, and no value stalls Redis."""
    poll = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.poll", url, "8"), stdout=subprocess.PIPE
    )
    async with TokentapeClient(url) as driver:
        session = await driver.open_session()
        await _chat(session.openai_base_url)
        held = await client.hgetall(keys.blobs(session.id))  # type: ignore[misc]
        sample = (await session.collect_samples(RolloutSample())).samples[0]
    rows = sample.rollout_routed_experts
    assert rows is not None
    assert rows.nbytes > 100e6
    assert np.array_equal(rows, replay_rows(0, len(sample.tokens) - 1, LAYERS, CHOICES))
    assert max(map(len, held.values())) == limits.STORE_VALUE_BYTES
    async for key in client.scan_iter(f"tt:{{{session.id}}}:samples:*"):
        assert max(map(len, await client.hvals(key))) == limits.STORE_VALUE_BYTES  # type: ignore[misc]
    output, _ = await poll.communicate()
    latencies = sorted(json.loads(output))
    assert latencies[int(len(latencies) * 0.99)] < 100
    assert latencies[-1] < 400


async def _chat(base_url: str) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": WORDS}]}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        reply = await http.post(f"{base_url}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.content) < 100_000
