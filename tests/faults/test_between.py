"""Processes that die between two effects, at the very command."""

import asyncio
import random
from typing import Any

import pytest

from tests.faults.cluster import Cluster
from tests.faults.history import History
from tests.support.fault_proxy import ANNOUNCEMENT, RESULT, TURN, FaultProxy, Moment, Rule

NEW = 99_999
"""A `max_seq_len` that no agent's own collect asks for: there is no result yet."""


async def _one_struck(rules: list[Rule], proxies: list[FaultProxy]) -> None:
    """Waits for the fault, which was armed at every process, and disarms the others."""
    async with asyncio.timeout(10):
        while not any(rule.struck.is_set() for rule in rules):
            await asyncio.sleep(0.001)
    for proxy in proxies:
        proxy.disarm()


@pytest.mark.parametrize(
    ("moment", "recorded"), [("before", 1), ("after", 2)], ids=["engine answered", "turn appended"]
)
async def test_an_api_process_dies_around_the_append(
    sound: Cluster, draw: random.Random, moment: Any, recorded: int
) -> None:
    """The engine has answered and nothing is recorded, or the turn is recorded and nobody was told.

    In either case the agent's next attempt, at another process, is answered, and that is the sample.
    """
    history = History()
    async with sound.workload(history, draw) as agent:
        session = await agent.open("linear")
        rules = [
            proxy.strike(TURN, moment, lambda api=api: sound.kill(api))  # type: ignore[misc]
            for proxy, api in zip(sound.api_proxies, sound.apis, strict=True)
        ]
        turn = asyncio.create_task(agent.turn(session, [{"role": "user", "content": "Hello"}], ""))
        await _one_struck(rules, sound.api_proxies)
        sound.faults[f"an API process is killed {moment} the append"] += 1
        await turn
        collected = await agent.collect(session)
        await agent.delete(session)
    await asyncio.to_thread(sound.heal)
    report = await sound.verify(history)
    assert report.recorded == recorded
    assert report.unclear == recorded - report.acknowledged
    assert collected.ok


async def test_a_worker_dies_around_the_announcement(sound: Cluster, draw: random.Random) -> None:
    """The result is written and nobody hears of it: the POST that waits finds it and is answered."""
    moment: Moment = draw.choice(["before", "after"])
    history = History()
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        rules = [
            proxy.strike(ANNOUNCEMENT, moment, lambda worker=worker: sound.kill(worker))  # type: ignore[misc]
            for proxy, worker in zip(sound.worker_proxies, sound.workers, strict=True)
        ]
        collected = await driver.collect_once(session, max_seq_len=NEW)
        await _one_struck(rules, sound.worker_proxies)
        sound.faults[f"a worker is killed {moment} the announcement"] += 1
        assert collected.status == 200
        assert collected.ended - collected.began < 10
        again = await driver.collect_once(session, max_seq_len=NEW)
        await driver.delete(session)
    await asyncio.to_thread(sound.heal)
    await sound.verify(history)
    assert (again.status, again.digest == collected.digest) == (200, again.contract == collected.contract)


@pytest.mark.parametrize(
    ("moment", "told"),
    [("before", (503, "assembly_failed")), ("after", (200, ""))],
    ids=["nothing stored", "stored"],
)
async def test_a_child_dies_around_its_result(
    sound: Cluster, draw: random.Random, moment: Any, told: tuple[int, str]
) -> None:
    """A child is killed around writing its result: 200 if it is stored, else 503 and the next POST is 200."""
    history = History()
    async with sound.workload(history, draw) as driver:
        session = await driver.open("tree")
        await driver.agent(session, 2)
        children = [sound.child(worker) for worker in sound.workers]
        rules = [
            proxy.strike(RESULT, moment, child.kill)
            for proxy, child in zip(sound.worker_proxies, children, strict=True)
        ]
        collected = await driver.collect_once(session, max_seq_len=NEW)
        await _one_struck(rules, sound.worker_proxies)
        sound.faults[f"a child is killed {moment} its result"] += 1
        assert (collected.status, collected.code) == told
        assert (await driver.collect_once(session, max_seq_len=NEW)).status == 200
        await driver.delete(session)
    await sound.verify(history, allowed={"assembly_failed"})
