"""The store behind Sentinels: a primary that is killed, or cut off, under load."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.sessions import opened, turn
from tests.support.topologies import QUOTED, sentinels
from tests.topologies.failover import MIN_REPLICAS, Fault, fail_over
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import StoreUnavailable
from tokentape_core.store import RedisStore, connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LAG_S = 0.05


@pytest.mark.parametrize("fault", ["killed", "isolated"])
async def test_waiting_for_a_replica_loses_nothing(tmp_path: Path, fault: Fault) -> None:
    """With one replica waited for, no acknowledged turn is lost with a primary that dies or is cut off."""
    outcome = await fail_over(tmp_path, fault, lag_s=LAG_S, wait_replicas=1)
    print(outcome)
    assert (outcome.found.lost, outcome.found.doubled, outcome.found.gaps) == (0, 0, 0)
    assert outcome.found.acknowledged > 100


async def test_a_lag_is_lost_with_the_primary(tmp_path: Path) -> None:
    """Without waiting, what the replicas lacked is lost, although they were in time: the guide says so."""
    outcome = await fail_over(tmp_path, "killed", lag_s=4 * LAG_S, lines=MIN_REPLICAS)
    print(outcome)
    assert outcome.found.lost > 0
    assert outcome.found.doubled == 0


async def test_min_replicas_bound_what_a_lonely_primary_takes(tmp_path: Path) -> None:
    """A primary that is cut off takes writes for as long as it is; with min-replicas for about a second."""
    outcomes = [
        await fail_over(tmp_path / str(len(lines)), "isolated", lines=lines) for lines in ((), MIN_REPLICAS)
    ]
    print(outcomes)
    assert outcomes[0].found.lost > 2 * outcomes[1].found.lost


async def test_what_was_found_there_must_be_replicated_too(
    tmp_path: Path, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that an earlier attempt wrote counts only when a replica has it, whoever finds it there."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.5)
    with sentinels(tmp_path) as made:
        clients = [connect(f"redis://:{QUOTED}@127.0.0.1:{made.servers[0].port}/0") for _ in range(2)]
        stores = [RedisStore(client, wait_replicas=1) for client in clients]
        await stores[0].open(session_id, opened())
        await clients[0].persist(keys.events(session_id))  # nothing that is refused writes anything
        event = turn()
        for replica in made.servers[1:]:
            replica.signal(signal.SIGSTOP)
        for store in (stores[0], stores[1], stores[1]):
            with pytest.raises(StoreUnavailable, match="0 replicas have confirmed the write, of 1"):
                await store.append(session_id, 1, event)
        assert await stores[0].tail(session_id) == "1-0"
        for replica in made.servers[1:]:
            replica.signal(signal.SIGCONT)
        await stores[1].append(session_id, 1, event)
        for client in clients:
            await client.aclose()


async def test_no_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Sentinel that answers the store is unavailable within the deadline, and says so."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.3)
    client = connect("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main")
    with pytest.raises(StoreUnavailable, match="No master found for 'main'"):
        await RedisStore(client).tail("a")
    await client.aclose()


async def test_a_sentinel_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a Sentinel names and that is a replica is not talked to."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.3)
    with sentinels(tmp_path) as made:
        client = connect(made.url())
        pool = client.connection_pool

        async def replica() -> tuple[str, int]:
            await asyncio.sleep(0)
            return "127.0.0.1", made.servers[1].port

        monkeypatch.setattr(
            pool,
            "_sentinels",
            type("Stale", (), {"discover_master": lambda *_: replica(), "sentinels": ()})(),
        )
        with pytest.raises(StoreUnavailable, match="is a replica"):
            await RedisStore(client).tail("a")
        await client.aclose()
