"""Work for a client that may go away."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")

HANGUP: Final = "tokentape.hangup"
"""Name of the ASGI extension by which a server tells that a client has gone: a `Hangup`."""


class Hangup:
    """Whether the client of a connection has gone, and what to do then.

    ASGI itself has the application wait for an event `http.disconnect`, hence a task beside every request.

    Args:
        listen: lets the server read on, which it may have stopped after a long body: else it does not notice.
    """

    def __init__(self, listen: Callable[[], object]) -> None:
        self.has_come = False
        self._listen = listen
        self._then: Callable[[], object] | None = None

    def come(self) -> None:
        """The client has gone."""
        self.has_come = True
        if self._then is not None:
            self._then()

    @contextmanager
    def wakes(self, then: Callable[[], object]) -> Iterator[None]:
        """Calls this if it comes within the block."""
        self._listen()
        self._then = then
        try:
            yield
        finally:
            self._then = None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. It is cancelled if the client goes away.

    A collect then holds no worker for nobody, and a chat that its client has given up, and perhaps sent
    again, is not recorded later as if it had been answered. The request's body must have been read. A server
    other than `BoundedHttp` does not tell, and the work goes on to its end.

    Raises:
        ClientDisconnect: the client is gone.
    """
    hangup: Hangup | None = request.scope.get("extensions", {}).get(HANGUP)
    if hangup is None:
        return await work
    ours = asyncio.current_task()
    if ours is None:
        raise RuntimeError("only a task can be cancelled")
    if hangup.has_come:
        work.close()
        raise ClientDisconnect
    try:
        with hangup.wakes(ours.cancel):
            return await work
    except asyncio.CancelledError:
        # Whoever else cancels this task wants it to end, whatever became of the client.
        if hangup.has_come and ours.uncancel() == 0:
            raise ClientDisconnect from None
        raise
