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
    ours = asyncio.current_task()
    if ours is None:
        raise RuntimeError("only a task can be cancelled")
    is_working, is_gone = True, False

    def cancel(_: "asyncio.Task[None]") -> None:
        nonlocal is_gone
        if is_working:
            is_gone = True
            ours.cancel()

    gone = asyncio.create_task(_disconnect(request))
    gone.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        # Whoever else cancels this task wants it to end, whatever became of the client.
        if is_gone and ours.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        is_working = False
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
