"""The store on a cluster: slots that move, and nodes that die, under load."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
import redis.asyncio
from redis.crc import key_slot
from redis.exceptions import ClusterCrossSlotError

from tests.support.sessions import opened, sealed, turn
from tests.support.topologies import Cluster, cluster, within
from tests.topologies.writers import Writers, found, in_slot
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import StoreUnavailable
from tokentape_core.store import MemoryStore, RedisStore, connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CLIENTS = 3


@pytest.fixture
async def clients(nodes: Cluster) -> AsyncIterator[list[redis.asyncio.Redis]]:
    """As of several processes: each finds out for itself where a slot is."""
    made = [connect(nodes.url()) for _ in range(CLIENTS)]
    yield made
    for client in made:
        await client.aclose()


def slot_of(session_id: str) -> int:
    return int(key_slot(session_id.encode()))


async def test_resharding_under_load(nodes: Cluster, clients: list[redis.asyncio.Redis]) -> None:
    """Slots that move one by one, key by key, cost no turn and no error, wherever a writer meets them."""
    writers = Writers([RedisStore(client) for client in clients], [uuid4().hex for _ in range(8)])
    late = 0
    async with writers.running():
        for session_id in writers.session_ids:
            slot = slot_of(session_id)
            source = await asyncio.to_thread(nodes.owner, slot)
            target = next(node for node in nodes.nodes if node is not source)
            await asyncio.to_thread(nodes.begin_move, slot, source, target)
            await writers.open(in_slot(slot, key_slot))
            late += 1
            await asyncio.sleep(0.1)
            await asyncio.to_thread(nodes.move_keys, slot, source, target, 1)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(nodes.move_keys, slot, source, target)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(nodes.end_move, slot, target)
            assert (await asyncio.to_thread(nodes.owner, slot)) is target
    outcome = await found(clients[0], writers)
    print(outcome, f"slowest {max(writers.times):.2f} s")
    assert writers.errors == []
    assert (outcome.lost, outcome.doubled, outcome.gaps) == (0, 0, 0)
    assert outcome.acknowledged > 100 * late


async def test_atomic_migration_under_load(nodes: Cluster, clients: list[redis.asyncio.Redis]) -> None:
    """Valkey's own migration of whole ranges of slots, to and fro, costs no turn and no error either."""
    writers = Writers([RedisStore(client) for client in clients], [uuid4().hex for _ in range(8)])
    moves = 0
    async with writers.running():
        for target, session_id in zip(itertools.cycle(nodes.nodes), writers.session_ids, strict=False):
            slot = slot_of(session_id)
            source = await asyncio.to_thread(nodes.owner, slot)
            if source is not target:
                await asyncio.to_thread(nodes.move_atomically, slot, slot, source, target)
                moves += 1
                await asyncio.sleep(0.2)
    outcome = await found(clients[0], writers)
    print(outcome, f"{moves} moves, slowest {max(writers.times):.2f} s")
    assert moves > 2
    assert writers.errors == []
    assert (outcome.lost, outcome.doubled, outcome.gaps) == (0, 0, 0)


async def test_a_slot_that_stays_open(
    nodes: Cluster, clients: list[redis.asyncio.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slot is open, what needs keys of both sides waits, and is unavailable at the deadline."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.5)
    store = RedisStore(clients[0])
    session_id = uuid4().hex
    await store.open(session_id, opened())
    slot = slot_of(session_id)
    source = nodes.owner(slot)
    target = next(node for node in nodes.nodes if node is not source)
    nodes.begin_move(slot, source, target)
    with pytest.raises(StoreUnavailable, match=f"slot {slot} is not settled"):
        await store.seal(session_id, sealed())
    await store.append(session_id, 1, turn())
    nodes.move_keys(slot, source, target)
    await store.append(session_id, 2, turn())
    nodes.end_move(slot, target)
    await store.seal(session_id, sealed())
    assert [entry_id for entry_id, _ in await store.read(session_id)][1:3] == ["1-0", "2-0"]


async def test_restoring_while_a_slot_moves(nodes: Cluster, clients: list[redis.asyncio.Redis]) -> None:
    """An import finds its slot elsewhere than it was, or open, and writes the session whole."""
    source = MemoryStore()
    slot = slot_of(uuid4().hex)
    for is_open in (True, False):
        session_id = in_slot(slot, key_slot)
        await source.open(session_id, opened())
        await source.append(session_id, 1, turn())
        recording = await source.export(session_id)
        assert recording is not None
        store = RedisStore(clients[0])
        here = nodes.owner(slot)
        there = next(node for node in nodes.nodes if node is not here)
        if is_open:
            nodes.begin_move(slot, here, there)
            restoring = asyncio.create_task(store.restore(recording))
            await asyncio.sleep(0.3)
            assert not restoring.done()
            nodes.move_keys(slot, here, there)
            nodes.end_move(slot, there)
            assert await restoring
        else:
            nodes.move(slot, here, there)
            assert await store.restore(recording)
        assert len(await store.read(session_id)) == 2


async def test_keys_of_two_slots_are_refused(clients: list[redis.asyncio.Redis]) -> None:
    """A pipeline that spans slots is a defect of ours, and is not sent."""
    pipe = clients[0].pipeline(transaction=True)
    pipe.zadd(keys.SEALED, {"a": 1})
    pipe.delete(keys.events("b"))
    with pytest.raises(ClusterCrossSlotError, match="2 slots"):
        await pipe.execute()
    assert await clients[0].zscore(keys.SEALED, "a") is None


async def test_a_cluster_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any node the store is unavailable within the deadline, and says so."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.3)
    client = connect("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(StoreUnavailable, match="no node of the cluster"):
        await RedisStore(client).tail("a")
    await client.aclose()


async def test_a_wrong_password() -> None:
    """It is told as what it is, and is not tried until the deadline."""
    with EmbeddedValkey() as node:
        client = connect(f"redis+cluster://:wrong@127.0.0.1:{node.port}")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="Redis refuses the login: "):
            await RedisStore(client).tail("a")
        assert time.monotonic() - began < limits.STORE_RETRY_S / 2
        await client.aclose()


@pytest.mark.parametrize("wait_replicas", [0, 1])
async def test_a_primary_is_killed(tmp_path: Path, wait_replicas: int) -> None:
    """A replica takes over within the deadline; no writer hears of it. Waiting for it, no turn is lost.

    The dead one comes back as a replica: those who wait for one need it.
    """
    with cluster(tmp_path, replicas=True) as made:
        clients = [connect(made.url()) for _ in range(CLIENTS)]
        writers = Writers(
            [RedisStore(client, wait_replicas=wait_replicas) for client in clients],
            [uuid4().hex for _ in range(8)],
        )
        async with writers.running():
            await asyncio.sleep(0.5)
            slot = slot_of(writers.session_ids[0])
            dead = made.owner(slot)
            dead.kill()
            await asyncio.to_thread(within, 8, lambda: made.owner(slot) is not dead)
            dead.start()
            await asyncio.sleep(3)
        outcome = await found(clients[0], writers)
        print(outcome, f"slowest {max(writers.times):.2f} s")
        for client in clients:
            await client.aclose()
    assert writers.errors == []
    assert outcome.doubled == 0
    if wait_replicas:
        assert (outcome.lost, outcome.gaps) == (0, 0)
