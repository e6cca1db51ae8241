"""A Redis that goes away, answers slowly, breaks off, refuses writes, or hands over to a replica."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import Cluster
from tests.support.fault_proxy import ANNOUNCEMENT, ENQUEUE, RESULT, SEAL, TURN, Moment
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_core.store import connect

RECOVERY_S = 5.0
"""Within this after an outage every API process and the workers do their work again."""


@asynccontextmanager
async def admin(server: EmbeddedValkey) -> AsyncIterator[Any]:
    client = connect(server.url)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
async def test_redis_restarts(sound: Cluster, draw: random.Random, how: str) -> None:
    """Redis with an append-only file ends and comes back: no request fails, nothing is lost."""
    async with sound.load(draw) as history:
        for _ in range(2):
            await asyncio.sleep(draw.uniform(0.2, 1.0))
            if how == "SIGTERM":
                await asyncio.to_thread(sound.valkey.stop)
            else:
                sound.kill_redis()
            sound.faults[f"Redis: {how}"] += 1
            await asyncio.sleep(draw.uniform(0.0, 1.0))
            await asyncio.to_thread(sound.valkey.restart)
        await asyncio.sleep(1.0)
    assert {call.status for call in history.calls} <= {200, 204, 404}


async def test_redis_is_slow_and_breaks_off(sound: Cluster, draw: random.Random) -> None:
    """Connections break in the middle of writes, and every answer is late: no request fails.

    Each lost reply leaves it open whether the entry was written; the writer reads it back by its uuid.
    """
    moments: list[Moment] = ["before", "inside", "after"]
    slow = draw.randrange(2, 30) / 1000
    before = sum(proxy.strikes for proxy in sound.proxies)
    async with sound.load(draw) as history:
        for proxy in sound.proxies:
            proxy.delay_s = lambda: draw.uniform(0.0, slow)
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            await asyncio.sleep(draw.uniform(0.02, 0.2))
            proxy = draw.choice(sound.proxies)
            if draw.random() < 0.1:
                proxy.cut()
                sound.faults["all connections of a process to Redis break"] += 1
                continue
            pattern = draw.choice([TURN, TURN, SEAL, RESULT, ANNOUNCEMENT, ENQUEUE])
            proxy.strike(pattern, draw.choice(moments))
        struck = sum(proxy.strikes for proxy in sound.proxies) - before
        sound.faults["a connection breaks around a write to Redis"] += struck
        assert struck > 5
    assert {call.status for call in history.calls} <= {200, 204, 404}


async def test_redis_is_silent(sound: Cluster, draw: random.Random) -> None:
    """One API process gets no answer for longer than a socket timeout; late commands do no harm."""
    async with sound.load(draw) as history:
        await asyncio.sleep(draw.uniform(0.2, 0.8))
        proxy = draw.choice(sound.api_proxies)
        proxy.hold()
        sound.faults["Redis is silent"] += 1
        await asyncio.sleep(draw.uniform(5.2, 6.5))
        proxy.release()
    given_up = [call for call in history.calls if call.status is None]
    # The driver waits 5 s for a DELETE, and leaves the rest to the session's expiry.
    assert {call.kind for call in given_up} <= {"delete"}
    assert {call.status for call in history.calls if call not in given_up} <= {200, 204, 404}


REFUSALS = {
    "out of memory": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "a read-only replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_redis_refuses_writes(sound: Cluster, draw: random.Random, refusal: str) -> None:
    """Writers get 503 `store_unavailable`, nothing is half-written, and all go on afterwards."""
    begin, end = REFUSALS[refusal]
    async with sound.load(draw, allowed={"store_unavailable"}) as history:
        await asyncio.sleep(draw.uniform(0.2, 0.8))
        async with admin(sound.valkey) as client:
            await client.execute_command(*begin)
            sound.faults[f"Redis: {refusal}"] += 1
            await asyncio.sleep(draw.uniform(0.5, 1.5))
            await client.execute_command(*end)
        since = time.monotonic()
        await _all_work(sound, draw)
        assert time.monotonic() - since < RECOVERY_S
    assert {call.code for call in history.calls if call.status == 503} == {"store_unavailable"}


async def test_redis_hands_over_to_a_replica(sound: Cluster, draw: random.Random, tmp_path: Path) -> None:
    """A replica takes over behind the same address, the old primary stays up, and everything goes on.

    Connections to the old one, which is read-only, are given up. The same on the way back.
    """
    password = sound.valkey.url.partition(":")[2].partition("@")[0].lstrip("/:")
    replica = EmbeddedValkey(tmp_path / "replica")
    replica._password = password
    with replica:
        async with admin(sound.valkey) as first, admin(replica) as second:
            for server in (first, second):
                await server.config_set("masterauth", password)
            async with sound.load(draw, allowed={"store_unavailable"}):
                await second.execute_command("REPLICAOF", "127.0.0.1", sound.valkey.port)
                for old, new, port in ((first, second, replica.port), (second, first, sound.valkey.port)):
                    await _hand_over(old, new, port)
                    for proxy in sound.proxies:
                        proxy.target = port
                    sound.faults["Redis: a replica takes over"] += 1
                    since = time.monotonic()
                    await _all_work(sound, draw)
                    assert time.monotonic() - since < RECOVERY_S
            await second.execute_command("REPLICAOF", "NO", "ONE")


async def _hand_over(old: Any, new: Any, port: int) -> None:
    """Waits for the replica to have everything, and makes it the primary of the other one."""
    while (await new.info("replication")).get("master_link_status") != "up":
        await asyncio.sleep(0.02)
    await old.execute_command("FAILOVER", "TO", "127.0.0.1", port)
    while (await old.info("replication"))["role"] != "slave" or (await new.info("replication"))[
        "role"
    ] != "master":
        await asyncio.sleep(0.02)


async def _all_work(sound: Cluster, draw: random.Random) -> None:
    """Waits until each API process has recorded a turn and answered a collect."""
    for url in sound.urls:
        async with sound.workload(sound.scratch, draw, [url]) as agent:
            session = await agent.open("linear")
            await agent.turn(session, [{"role": "user", "content": "Hello"}], "")
            await agent.collect(session)
            await agent.delete(session)
