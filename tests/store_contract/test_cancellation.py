"""A task that talks to Redis can be cancelled at any moment."""

import asyncio

from tokentape_core.store import connect

MOMENTS = 60


async def test_a_cancellation_is_never_lost(redis_url: str) -> None:
    """Not even at the moment in which a command has just been sent."""
    client = connect(redis_url)

    async def talk() -> None:
        while True:
            await client.get("key")

    await client.get("key")
    for moment in range(MOMENTS):
        task = asyncio.create_task(talk())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        task.cancel()
        assert done, f"cancelled after {moment} turns of the loop, it goes on"
    await client.aclose()
