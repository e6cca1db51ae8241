"""Threads for work on requests that would hold up the event loop: parsing, matching, rendering.

Work waits only for work of about its own size: each size has threads and a queue of its own. Within a queue
the tenants take turns, and within a tenant its sessions, so that nobody waits for all that another has sent.
"""

import asyncio
import contextvars
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from tokentape_contracts import limits
from tokentape_contracts.errors import Overloaded

T = TypeVar("T")


class _Size(NamedTuple):
    at_most: float
    threads: int


_SIZES: Final = (_Size(64 * 1024, 2), _Size(512 * 1024, 2), _Size(float("inf"), 1))
"""What has threads of its own, by what it costs. The largest has one, as tokenising it may take most of the
memory that a process is given (`limits.PROMPT_TEXT_BYTES`)."""


class Sender(NamedTuple):
    """For whom work is done; either name may be empty."""

    tenant: str
    session: str


@dataclass(slots=True, eq=False)
class _Piece:
    """Work that waits; `outcome` is what its caller waits for."""

    do: Callable[[], Any]
    outcome: asyncio.Future[Any]


class Workers:
    """The threads of one API process."""

    def __init__(self) -> None:
        self._lanes = [_Lane(size.threads) for size in _SIZES]

    async def run(self, cost: int, sender: Sender, work: Callable[[], T]) -> T:
        """What the work gives or raises.

        Work that costs up to `limits.WORK_INLINE_BYTES` is done at once. Other work is dropped if the caller
        is cancelled before a thread has taken it.

        Args:
            cost: bytes that would take as long to tokenise.

        Raises:
            Overloaded: too much work of that size waits, or this has waited for too long.
        """
        if cost <= limits.WORK_INLINE_BYTES:
            return work()
        lane = next(lane for lane, size in zip(self._lanes, _SIZES, strict=True) if cost <= size.at_most)
        return await lane.run(sender, work)

    def waiting(self) -> int:
        """How many pieces of work wait for a thread."""
        return sum(lane.queue.size for lane in self._lanes)

    def close(self) -> None:
        """Lets the threads end once they have done what they do."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """The threads for one size of work, and what waits for them."""

    def __init__(self, threads: int) -> None:
        self.queue = _FairQueue()
        self._idle = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="work")

    async def run(self, sender: Sender, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        piece = _Piece(partial(contextvars.copy_context().run, work), loop.create_future())
        self.queue.put(sender, piece)
        late = loop.call_later(limits.WORK_WAIT_S, self._refuse, sender, piece)
        try:
            self._begin()
            result: T = await piece.outcome
            return result
        finally:
            late.cancel()
            self.queue.remove(sender, piece)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._idle and (piece := self.queue.take()) is not None:
            self._idle -= 1
            done = asyncio.get_running_loop().run_in_executor(self._threads, piece.do)
            done.add_done_callback(partial(self._end, piece))

    def _end(self, piece: _Piece, done: asyncio.Future[Any]) -> None:
        self._idle += 1
        if not piece.outcome.done():  # nobody waits for it any more
            if (error := done.exception()) is not None:
                piece.outcome.set_exception(error)
            else:
                piece.outcome.set_result(done.result())
        else:
            done.exception()
        self._begin()

    def _refuse(self, sender: Sender, piece: _Piece) -> None:
        if self.queue.remove(sender, piece) and not piece.outcome.done():
            piece.outcome.set_exception(
                Overloaded(f"no thread was free for the request within {limits.WORK_WAIT_S:g} s")
            )


class _FairQueue:
    """Pieces of work by sender. One that is full refuses the newest of whoever has the most in it."""

    def __init__(self) -> None:
        self.size = 0
        self._tenants: OrderedDict[str, OrderedDict[str, deque[_Piece]]] = OrderedDict()

    def put(self, sender: Sender, piece: _Piece) -> None:
        sessions = self._tenants.setdefault(sender.tenant, OrderedDict())
        sessions.setdefault(sender.session, deque()).append(piece)
        self.size += 1
        if self.size > limits.WORK_QUEUE:
            tenant, most = max(self._tenants.items(), key=lambda item: sum(map(len, item[1].values())))
            session = max(most, key=lambda name: len(most[name]))
            refused = most[session][-1]
            self.remove(Sender(tenant, session), refused)
            if not refused.outcome.done():
                refused.outcome.set_exception(
                    Overloaded(f"{limits.WORK_QUEUE} requests of about this size wait for a thread already")
                )

    def take(self) -> _Piece | None:
        """The next piece in turn; its sender's next one comes after those of all others."""
        if not self._tenants:
            return None
        tenant, sessions = next(iter(self._tenants.items()))
        session, pieces = next(iter(sessions.items()))
        piece = pieces[0]
        sessions.move_to_end(session)
        self._tenants.move_to_end(tenant)
        self.remove(Sender(tenant, session), piece)
        return piece

    def remove(self, sender: Sender, piece: _Piece) -> bool:
        """Whether it was there."""
        sessions = self._tenants.get(sender.tenant, OrderedDict())
        pieces = sessions.get(sender.session, deque())
        if piece not in pieces:
            return False
        pieces.remove(piece)
        self.size -= 1
        if not pieces:
            del sessions[sender.session]
        if not sessions:
            del self._tenants[sender.tenant]
        return True
