"""Work for a client that may go away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. It is cancelled if the client goes away.

    A collect then holds no worker for nobody, and a chat that its client has given up, and perhaps sent
    again, is not recorded later as if it had been answered. The request's body must have been read.

    Raises:
        ClientDisconnect: the client is gone.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
        await asyncio.wait({task, gone})


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
