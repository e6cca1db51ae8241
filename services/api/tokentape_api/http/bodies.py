"""Reading request bodies within their limits."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from tokentape_api.http.access import caller_of
from tokentape_api.http.connected import while_connected
from tokentape_api.work import Sender, Workers
from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest, Overloaded, RequestTooLarge
from tokentape_contracts.http import marks_in

T = TypeVar("T")

STALLED: Final = "tokentape.stalled"
"""Name of the ASGI extension that a request gets when its body has paused for `limits.REQUEST_BODY_S`."""


class Bodies:
    """Reads the bodies of requests within their limits, and all of them within one more.

    Args:
        workers: parse what would hold up the event loop.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.held = 0
        """Bytes of all bodies whose block has not ended, or what they say takes in memory if that is more."""

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """The request's body, which counts until the block ends.

        Raises:
            RequestTooLarge: it is longer than `limit` bytes; reading stops there.
            Overloaded: all bodies together are above `limits.BODIES_BYTES`.
            InvalidRequest: it paused for too long. Only `BoundedHttp` tells.
            ClientDisconnect: the client is gone.
        """
        with self._held() as hold:
            yield await _read(request, limit, hold)

    @asynccontextmanager
    async def parsed(
        self,
        request: Request,
        limit: int,
        parse: Callable[[bytes], T],
        size: Callable[[T], int] = lambda _: 0,
    ) -> AsyncIterator[tuple[T, int]]:
        """What `parse` makes of the request's body, which is read, and counts, as with `read`; and its cost.

        The cost of parsing it, or of comparing what it says, is in bytes that would take as long to tokenise.

        Args:
            size: bytes of memory that what was parsed takes; 0 if that is no more than the body's.

        Raises:
            Overloaded: also where no thread is free for a long body.
            TokentapeError: what `parse` raises.
        """
        sender = Sender(caller_of(request).tenant, request.path_params.get("sid", ""))
        with self._held() as hold:
            body = await _read(request, limit, hold)
            cost, work = _cost(body), partial(parse, body)
            parsed = await while_connected(request, self._workers.run(cost, sender, work))
            hold(max(0, size(parsed) - len(body)))
            del body, work  # nobody needs them for as long as what they say
            yield parsed, cost

    @contextmanager
    def _held(self) -> Iterator[Callable[[int], None]]:
        """What is told of bytes that are held until the block ends, and refuses them if they are too many."""
        size = 0

        def hold(more: int) -> None:
            nonlocal size
            size += more
            self.held += more
            if self.held > limits.BODIES_BYTES:
                raise Overloaded(
                    f"this process works on requests of {limits.BODIES_BYTES} bytes already; send it again"
                )

        try:
            yield hold
        finally:
            self.held -= size


def _cost(body: bytes) -> int:
    # A short body cannot hold so many values that it would be worth counting them.
    return len(body) // 64 + (marks_in(body) if len(body) > 2 * limits.WORK_INLINE_BYTES else 0)


async def _read(request: Request, limit: int, hold: Callable[[int], None]) -> bytes:
    """A body; `hold` hears of the length of each piece, and may refuse it."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise RequestTooLarge(f"the body is longer than {limit} bytes")
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        hold(len(chunks[-1]))
        size += len(chunks[-1])
        if size > limit:
            raise RequestTooLarge(f"the body is longer than {limit} bytes")
        more = message.get("more_body", False)
        if more and STALLED in request.scope.get("extensions", ()):
            raise InvalidRequest(f"nothing of the body's rest came for {limits.REQUEST_BODY_S:g} s")
    return b"".join(chunks)
