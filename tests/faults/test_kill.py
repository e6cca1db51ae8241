"""Processes that are killed, and processes that are told to stop, under load."""

import asyncio
import random

from tests.faults.cluster import Cluster
from tests.support.fault_proxy import RENEWAL


async def test_an_api_process_is_killed(sound: Cluster, draw: random.Random) -> None:
    """SIGKILL to an API process under load: agents go on at the other one, and nothing is lost or doubled."""
    async with sound.load(draw):
        await asyncio.sleep(draw.uniform(0.3, 1.5))
        sound.kill(draw.choice(sound.apis))
        sound.faults["an API process is killed"] += 1
        await asyncio.sleep(2)


async def test_a_worker_is_killed_in_mid_assembly(sound: Cluster, draw: random.Random) -> None:
    """The job of a killed worker runs again: every POST that waits is answered with 200."""
    async with sound.load(draw, metadata={"fault": 0.7}) as history:
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        number = draw.randrange(len(sound.workers))
        victim = sound.workers[number]
        rule = sound.worker_proxies[number].strike(RENEWAL, "beside", lambda: sound.kill(victim))
        assert await asyncio.to_thread(rule.struck.wait, 20)
        sound.faults["a worker is killed in mid-assembly"] += 1
        await asyncio.sleep(3)
    assert {call.status for call in history.of("collect")} <= {200, 404}


async def test_sigterm_drains(sound: Cluster, draw: random.Random) -> None:
    """SIGTERM to an API process and a worker: no 5xx, no recorded turn that nobody heard of, exit 0."""
    async with sound.load(draw, metadata={"fault": 0.3}) as history:
        await asyncio.sleep(draw.uniform(0.5, 1.5))
        ending = [draw.choice(sound.apis), draw.choice(sound.workers)]
        for running in ending:
            sound.terminate(running)
            sound.faults["SIGTERM"] += 1
        for running in ending:
            assert await asyncio.to_thread(running.process.wait, 20) == 0
    assert sound.report.unclear == 0
    assert {call.status for call in history.calls} <= {200, 204, 404, None}
