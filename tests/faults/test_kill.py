"""Processes that are killed, and processes that are told to stop, under load."""

import asyncio
import random
import time
from pathlib import Path
from typing import Final

from tests.faults.cluster import WORKERS, Cluster
from tests.faults.hooks import came_to
from tests.support.fault_proxy import RENEWAL
from tests.support.processes import wait_until

ACCEPTED_S: Final = 0.5
"""A request that was sent so long ago has been accepted."""
NOT_ACCEPTED: Final = ("ConnectError", "ReadError", "WriteError", "RemoteProtocolError: Server disconnected")
"""What a client hears whose request meets a closed port, or a connection that is just being closed."""


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


async def test_sigterm_drains(sound: Cluster, draw: random.Random, tmp_path: Path) -> None:
    """SIGTERM to an API process and a worker amid their work: what they had accepted is answered, exit 0.

    The API process waits for the engine and for collects, and each worker has one of these.
    """
    number = draw.randrange(len(sound.apis))
    api, worker = ending = [sound.apis[number], draw.choice(sound.workers)]
    (engine,) = sound.engine_proxies
    async with (
        sound.load(draw, metadata={"fault": 0.3}) as history,
        sound.workload(history, draw, [sound.urls[number]]) as client,
    ):
        await asyncio.sleep(draw.uniform(0.5, 1.5))
        session = await client.open("tree")
        await client.turn(session, [{"role": "user", "content": "one"}], "")
        engine.hold()
        chat = asyncio.create_task(client.turn(session, [{"role": "user", "content": "two"}], ""))
        folder = tmp_path / "collects"
        collects = asyncio.create_task(client.collect_together(session, folder, WORKERS, 3.0))
        await asyncio.to_thread(wait_until, lambda: folder.exists() and len(came_to(folder)) == WORKERS)
        await asyncio.sleep(ACCEPTED_S)
        signalled = time.monotonic()
        for running in ending:
            sound.terminate(running)
            sound.faults["SIGTERM"] += 1
        assert [call.status for call in await collects] == [200] * WORKERS
        assert not chat.done()
        assert api.process.poll() is None
        engine.release()
        await chat
        for running in ending:
            assert await asyncio.to_thread(running.process.wait, 20) == 0
    unanswered = [call for call in history.calls if call.status is None]
    assert [call for call in unanswered if call.began < signalled - ACCEPTED_S] == []
    assert [call for call in unanswered if not call.error.startswith(NOT_ACCEPTED)] == []
    assert {call.status for call in history.calls} <= {200, 204, 404, None}
    assert sound.report.unclear == 0
    ended = worker.output().partition("running jobs are finished first")[2].splitlines()
    assert any(session in line and '"outcome":"stored"' in line for line in ended)
