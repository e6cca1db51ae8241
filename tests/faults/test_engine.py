"""An engine that dies and comes back, or whose answers break off."""

import asyncio
import random
from typing import get_args

from tests.faults.cluster import Cluster
from tests.support.fault_proxy import GENERATION, Moment

MOMENTS = [moment for moment in get_args(Moment) if moment != "beside"]


async def test_the_engine_dies_and_comes_back(sound: Cluster, draw: random.Random) -> None:
    """Agents get 503 `engine_unavailable`, nothing is recorded of it, and all go on by themselves."""
    async with sound.load(draw, allowed={"engine_unavailable"}) as history:
        for _ in range(2):
            await asyncio.sleep(draw.uniform(0.3, 1.0))
            sound.engine.kill()
            sound.faults["the engine is killed"] += 1
            await asyncio.sleep(draw.uniform(0.1, 0.5))
            await asyncio.to_thread(sound.start_engine)
        await asyncio.sleep(1)
    refused = {call.code for call in history.of("chat") if call.status == 503}
    assert refused == {"engine_unavailable"}
    assert sound.report.unclear == 0


async def test_connections_to_the_engine_break(sound: Cluster, draw: random.Random) -> None:
    """Before the engine has the request, within it, before its answer and amid it: no turn is recorded."""
    (proxy,) = sound.engine_proxies
    async with sound.load(draw, allowed={"engine_unavailable"}) as history:
        before = proxy.strikes
        for _ in range(20):
            await asyncio.sleep(draw.uniform(0.02, 0.2))
            proxy.strike(GENERATION, draw.choice(MOMENTS))
        proxy.cut()
        await asyncio.sleep(0.5)
        struck = proxy.strikes - before
        sound.faults["a connection to the engine breaks"] += struck
    assert struck > 5
    assert len([call for call in history.of("chat") if call.code == "engine_unavailable"]) >= struck
    assert sound.report.unclear == 0
