"""A turn that comes late: its client has gone, has sent the request again elsewhere, and has gone on."""

import asyncio
import random

from tests.faults.cluster import Cluster
from tests.faults.history import History
from tests.support.fault_proxy import TURN


async def test_a_late_turn_does_not_displace_the_one_that_was_told(
    sound: Cluster, draw: random.Random
) -> None:
    """The agent gave up on a slow process, another answered: its conversation goes on from there."""
    history = History()
    proxy = sound.api_proxies[0]
    async with (
        sound.workload(history, draw, sound.urls[:1]) as slow,
        sound.workload(history, draw, sound.urls[1:]) as fast,
    ):
        session = await fast.open("linear")
        messages = [{"role": "user", "content": "one"}]
        first, answer = await fast.turn(session, messages, "")
        messages += [answer, {"role": "user", "content": "two"}]
        rule = proxy.strike(TURN, "before", proxy.hold)
        late = asyncio.create_task(slow.turn(session, messages, first.response_id))
        assert await asyncio.to_thread(rule.struck.wait, 10)
        told, answer = await fast.turn(session, messages, first.response_id)
        proxy.release()
        await late  # a real client would not hear it any more
        sound.faults["a turn comes late"] += 1
        messages += [answer, {"role": "user", "content": "three"}]
        await fast.turn(session, messages, told.response_id)
    await sound.verify(history)
