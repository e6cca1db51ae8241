"""Agents that stream, and connections of clients that break amid an answer."""

import asyncio
import random

from tests.faults.cluster import Cluster
from tests.support.fault_proxy import STREAM


async def test_streams_break_off(sound: Cluster, draw: random.Random) -> None:
    """A client whose answer breaks off has its turn in the stream, and sends it again: both are there."""
    async with sound.load(draw, urls=sound.broken_urls) as history:
        before = sum(proxy.strikes for proxy in sound.agent_proxies)
        for _ in range(20):
            await asyncio.sleep(draw.uniform(0.02, 0.2))
            draw.choice(sound.agent_proxies).strike(STREAM, draw.choice(["amid", "amid", "after"]))
        await asyncio.sleep(1)
        struck = sum(proxy.strikes for proxy in sound.agent_proxies) - before
        sound.faults["a client's stream breaks off"] += struck
    broken = [call for call in history.of("chat") if call.streams and call.status is None]
    assert struck > 5
    assert len(broken) == struck
    assert sound.report.unclear == struck


async def test_clients_connections_break(sound: Cluster, draw: random.Random) -> None:
    """All connections of the clients, the driver's too, break again and again, whatever is on its way.

    Until a collect got through between two breaks, which on a slow machine takes more of them.
    """
    async with sound.load(draw, urls=sound.broken_urls) as history:
        breaks = 0
        while breaks < 8 or (breaks < 80 and not any(call.handed for call in history.of("collect"))):
            await asyncio.sleep(draw.uniform(0.1, 0.4))
            for proxy in sound.agent_proxies:
                proxy.cut()
            breaks += 1
        sound.faults["all connections of the clients break"] += breaks
    assert any(call.status is None for call in history.calls)
    assert any(call.handed for call in history.of("collect"))
