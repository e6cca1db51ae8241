"""A child process that crashes, hangs, or takes memory: its collect fails, and every worker goes on."""

import asyncio
import random
import resource
from pathlib import Path

import psutil
import pytest

from tests.faults.cluster import WORKERS, Cluster
from tests.faults.history import History
from tests.faults.hooks import came_to
from tests.faults.workload import Workload
from tokentape_contracts import keys
from tokentape_core.store import connect

MEMORY_BYTES = 512 * 1024 * 1024
DEADLINE_S = 2.0
ENDED_S = 1.5
"""So long after its deadline at most a child that hangs is gone."""


async def _all_work(sound: Cluster, driver: Workload, session: str, folder: Path) -> None:
    """Each worker assembles a new job, at the same time as the others."""
    calls = await driver.collect_together(session, folder, WORKERS)
    assert [call.status for call in calls] == [200] * WORKERS
    assert came_to(folder) == {sound.child(worker).pid for worker in sound.workers}


@pytest.fixture
def pids(sound: Cluster) -> list[int]:
    """The workers, before anything happens to their children."""
    return [worker.process.pid for worker in sound.workers]


async def test_a_child_crashes(sound: Cluster, draw: random.Random, pids: list[int], tmp_path: Path) -> None:
    """503 `assembly_failed` at once, with how the child ended; nothing is stored, and each worker goes on."""
    history = History()
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.turn(session, [{"role": "user", "content": "Hello"}], "")
        calls = await driver.collect_together(session, tmp_path / "crash", WORKERS, "exit")
        for call in calls:
            sound.faults["a child crashes"] += 1
            assert (call.status, call.code) == (503, "assembly_failed")
            assert "exit code 3" in call.detail
        async with connect(sound.valkey.url) as client:
            assert await client.keys(keys.samples(session, "*")) == []
        await _all_work(sound, driver, session, tmp_path / "afterwards")
    await sound.verify(history, allowed={"assembly_failed"})
    assert [worker.process.pid for worker in sound.workers] == pids


async def test_a_child_hangs(sound: Cluster, draw: random.Random, pids: list[int], tmp_path: Path) -> None:
    """504 at the deadline of those who wait; then that child is gone, no other, and its worker goes on."""
    history = History()
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        children = [sound.child(worker) for worker in sound.workers]
        (call,) = await driver.collect_together(session, tmp_path / "hang", 1, "hang", DEADLINE_S)
        sound.faults["a child hangs"] += 1
        assert (call.status, call.code) == (504, "deadline_exceeded")
        gone, _ = await asyncio.to_thread(psutil.wait_procs, children, ENDED_S)
        assert {child.pid for child in gone} == came_to(tmp_path / "hang")
        await _all_work(sound, driver, session, tmp_path / "afterwards")
    await sound.verify(history, allowed={"deadline_exceeded"})
    assert [worker.process.pid for worker in sound.workers] == pids


async def test_a_child_takes_too_much_memory(
    sound: Cluster, draw: random.Random, pids: list[int], tmp_path: Path
) -> None:
    """With a bound on a child's memory (`ulimit -d`) the collect fails, and each worker goes on."""
    history = History()
    for worker in sound.workers:
        child = sound.child(worker)
        bound = child.memory_info().data + MEMORY_BYTES
        resource.prlimit(child.pid, resource.RLIMIT_DATA, (bound, bound))
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        for call in await driver.collect_together(session, tmp_path / "eat", WORKERS, "eat"):
            sound.faults["a child takes too much memory"] += 1
            assert (call.status, call.code) == (503, "assembly_failed")
        await _all_work(sound, driver, session, tmp_path / "afterwards")
    await sound.verify(history, allowed={"assembly_failed"})
    assert [worker.process.pid for worker in sound.workers] == pids
    for worker in sound.workers:
        sound.child(worker).kill()  # the next one is not bounded
