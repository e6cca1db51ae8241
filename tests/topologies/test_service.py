"""The whole service on a cluster that is resharded, and behind Sentinels that change the primary."""

import asyncio
from pathlib import Path

import pytest
import redis

from tests.support.topologies import SLOTS, Cluster, Server, cluster, sentinels, within
from tests.topologies.service import service
from tokentape_cli.embedded import EmbeddedValkey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EPISODES = 4
MOVES = 40


@pytest.mark.parametrize("moves", ["slot by slot", "atomic"])
async def test_resharding(nodes: Cluster, tokenizer_dir: Path, tmp_path: Path, moves: str) -> None:
    """While slots move, agents and drivers notice nothing; the queue lies elsewhere."""
    with (
        EmbeddedValkey() as queue,
        service(tmp_path, tokenizer_dir, nodes.url(), queue.url) as running,
    ):
        async with running.load(EPISODES) as report:
            await asyncio.sleep(2)
            source, target = nodes.nodes[:2]
            await asyncio.to_thread(_move, nodes, source, target, moves == "atomic")
            await asyncio.sleep(1)
            await asyncio.to_thread(_move, nodes, target, source, moves == "atomic")
        assert report.problems == []
        assert report.acknowledged > 50
        assert report.collects > 10
        assert report.unclear == 0
        assert _names(queue.url) <= {b"tt:wake"} | {name for name in _names(queue.url) if b"replies" in name}


def _move(nodes: Cluster, source: Server, target: Server, is_atomic: bool) -> None:
    """A range of slots at once, or, one after the other, those that have keys."""
    if is_atomic:
        nodes.move_atomically(0, SLOTS // 6, source, target)
        return
    for slot in nodes.used(source)[:MOVES]:
        nodes.move(slot, source, target)


def _names(url: str) -> set[bytes]:
    with redis.Redis.from_url(url) as client:
        return set(client.keys("*"))


async def test_a_primary_of_the_cluster_dies(tokenizer_dir: Path, tmp_path: Path) -> None:
    """A replica takes over: turns wait for it, and with `redis-wait-replicas` none that was told is lost."""
    with (
        cluster(tmp_path / "cluster", replicas=True) as nodes,
        EmbeddedValkey() as queue,
        service(tmp_path, tokenizer_dir, nodes.url(), queue.url, "--redis-wait-replicas", "1") as running,
    ):
        async with running.load(EPISODES) as report:
            await asyncio.sleep(2)
            dead = nodes.nodes[0]
            dead.kill()
            await asyncio.to_thread(within, 10, lambda: nodes.owner(0) is not dead)
            dead.start()
            await asyncio.sleep(3)
        assert report.problems == []
        assert report.acknowledged > 50


async def test_a_failover_of_sessions_and_queue(tokenizer_dir: Path, tmp_path: Path) -> None:
    """Sentinels change the primary of sessions and queue: nothing is lost, and every collect is answered."""
    with (
        sentinels(tmp_path / "sentinels") as made,
        service(tmp_path, tokenizer_dir, made.url(), made.url(), "--redis-wait-replicas", "1") as running,
    ):
        async with running.load(EPISODES) as report:
            await asyncio.sleep(2)
            dead = made.primary
            dead.kill()
            await asyncio.to_thread(within, 20, lambda: made.primary is not dead)
            await asyncio.sleep(4)
        assert report.problems == []
        assert report.acknowledged > 50
        assert report.collects > 10
