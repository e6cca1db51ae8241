"""A child process that crashes, hangs, or takes memory: one collect fails, and the worker goes on."""

import asyncio
import random
import resource
from typing import Any

import psutil
import pytest

from tests.faults.cluster import WORKERS, Cluster
from tests.faults.history import Call, History
from tests.faults.workload import Workload

MEMORY_BYTES = 512 * 1024 * 1024


async def _collect(driver: Workload, session: str, fault: Any, deadline_s: float = 20.0) -> Call:
    return await driver.collect_once(session, deadline_s, metadata={"fault": fault})


@pytest.fixture
def pids(sound: Cluster) -> list[int]:
    """The workers, before anything happens to their children."""
    return [worker.process.pid for worker in sound.workers]


async def test_a_child_crashes(sound: Cluster, draw: random.Random, pids: list[int]) -> None:
    """503 `assembly_failed` at once, with how the child ended; nothing is stored, and the worker goes on."""
    history = History()
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        for _ in range(WORKERS):
            call = await _collect(driver, session, "exit")
            sound.faults["a child crashes"] += 1
            assert (call.status, call.code) == (503, "assembly_failed")
        assert (await _collect(driver, session, None)).status == 200
    await sound.verify(history, allowed={"assembly_failed"})
    assert [worker.process.pid for worker in sound.workers] == pids


async def test_a_child_hangs(sound: Cluster, draw: random.Random, pids: list[int]) -> None:
    """504 at the deadline of those who wait; then the child is gone, and its worker takes the next job."""
    history = History()
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        children = [sound.child(worker) for worker in sound.workers]
        call = await _collect(driver, session, "hang", 2.0)
        sound.faults["a child hangs"] += 1
        assert (call.status, call.code) == (504, "deadline_exceeded")
        assert await asyncio.to_thread(psutil.wait_procs, children, 1.5) != ([], children)
        assert (await _collect(driver, session, None)).status == 200
    await sound.verify(history, allowed={"deadline_exceeded"})
    assert [worker.process.pid for worker in sound.workers] == pids


async def test_a_child_takes_too_much_memory(sound: Cluster, draw: random.Random, pids: list[int]) -> None:
    """With a bound on a child's memory (`ulimit -d`) the collect fails, and the worker goes on."""
    history = History()
    for worker in sound.workers:
        child = sound.child(worker)
        bound = child.memory_info().data + MEMORY_BYTES
        resource.prlimit(child.pid, resource.RLIMIT_DATA, (bound, bound))
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        call = await _collect(driver, session, "eat")
        sound.faults["a child takes too much memory"] += 1
        assert call.code == "assembly_failed"
        for _ in range(WORKERS):
            assert (await driver.collect(session)).status == 200
    await sound.verify(history, allowed={"assembly_failed"})
    assert [worker.process.pid for worker in sound.workers] == pids
    for worker in sound.workers:
        sound.child(worker).kill()  # the next one is not bounded
