"""Threads for work on requests: who waits for whom, and who is refused."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

import pytest

from tokentape_api.work import Sender, Workers
from tokentape_contracts import limits
from tokentape_contracts.errors import Overloaded

SMALL, MIDDLE, LARGE = limits.WORK_INLINE_BYTES + 1, 100 * 1024, 1024 * 1024
A1, A2, B1 = Sender("a", "1"), Sender("a", "2"), Sender("b", "1")

NAME: ContextVar[str] = ContextVar("NAME", default="none")


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


class Gate:
    """Work that waits until it is let through, and the order in which that was begun."""

    def __init__(self) -> None:
        self.begun: list[object] = []
        self._open = threading.Event()

    def work(self, name: object) -> Callable[[], object]:
        def wait() -> object:
            self.begun.append(name)
            self._open.wait(10)
            return name

        return wait

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


async def test_small_work_is_done_at_once(workers: Workers) -> None:
    """Up to the limit it runs on the event loop, without a turn of it; beyond, in a thread."""
    on_loop = await workers.run(limits.WORK_INLINE_BYTES, A1, threading.current_thread)
    elsewhere = await workers.run(limits.WORK_INLINE_BYTES + 1, A1, threading.current_thread)
    assert on_loop is threading.main_thread() is not elsewhere


async def test_results_errors_and_context(workers: Workers) -> None:
    """A thread gives what the work gives and raises what it raises, in the caller's context."""
    NAME.set("caller's")
    assert await workers.run(SMALL, A1, NAME.get) == "caller's"
    with pytest.raises(ZeroDivisionError):
        await workers.run(LARGE, A1, lambda: 1 // 0)


async def test_no_size_waits_for_another(workers: Workers, gate: Gate) -> None:
    """While every thread for large and middle work is busy and more waits, small work is done."""
    busy = [
        asyncio.create_task(workers.run(cost, A1, gate.work(cost))) for cost in [LARGE] * 5 + [MIDDLE] * 5
    ]
    await _settled()
    assert workers.waiting() == 4 + 3
    assert await asyncio.wait_for(workers.run(SMALL, A1, lambda: "done"), 1) == "done"
    gate.open()
    assert await asyncio.gather(*busy) == [LARGE] * 5 + [MIDDLE] * 5
    assert workers.waiting() == 0


async def test_tenants_and_their_sessions_take_turns(workers: Workers, gate: Gate) -> None:
    """Whoever has sent much waits behind whoever has sent little; one sender's work keeps its order."""
    sent = [(A1, i) for i in range(4)] + [(A2, 0), (A2, 1), (B1, 0), (B1, 1)]
    tasks = [asyncio.create_task(workers.run(LARGE, A1, gate.work("first")))]
    await _settled()
    tasks += [asyncio.create_task(workers.run(LARGE, sender, gate.work((sender, i)))) for sender, i in sent]
    await _settled()
    assert gate.begun == ["first"]
    gate.open()
    await asyncio.gather(*tasks)
    assert gate.begun[1:] == [(A1, 0), (B1, 0), (A2, 0), (B1, 1), (A1, 1), (A2, 1), (A1, 2), (A1, 3)]


async def test_a_full_queue(workers: Workers, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as much as the limit; one more, and the newest of whoever has the most waiting is refused."""
    monkeypatch.setattr(limits, "WORK_QUEUE", 3)
    tasks = [asyncio.create_task(workers.run(LARGE, A1, gate.work("first")))]
    await _settled()
    for sender, name in ((A1, "a1"), (A2, "a2"), (A2, "a3")):
        tasks.append(asyncio.create_task(workers.run(LARGE, sender, gate.work(name))))
    await _settled()
    assert (workers.waiting(), [task.done() for task in tasks]) == (3, [False] * 4)
    tasks.append(asyncio.create_task(workers.run(LARGE, B1, gate.work("b1"))))
    await _settled()
    assert workers.waiting() == 3
    with pytest.raises(Overloaded, match="3 requests"):
        await asyncio.wait_for(tasks.pop(3), 1)
    gate.open()
    assert await asyncio.gather(*tasks) == ["first", "a1", "a2", "b1"]


async def test_a_wait_that_ends(workers: Workers, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work whose turn comes within the time is done, however long it then takes itself."""
    monkeypatch.setattr(limits, "WORK_WAIT_S", 0.2)
    assert await workers.run(LARGE, A1, lambda: time.sleep(0.4) or "slow") == "slow"


async def test_a_wait_too_long(workers: Workers, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that waits for longer is refused and never done."""
    monkeypatch.setattr(limits, "WORK_WAIT_S", 0.1)
    first = asyncio.create_task(workers.run(LARGE, A1, gate.work("first")))
    await _settled()
    with pytest.raises(Overloaded, match=r"within 0\.1 s"):
        await asyncio.wait_for(workers.run(LARGE, B1, gate.work("late")), 1)
    assert workers.waiting() == 0
    gate.open()
    assert await first == "first"
    assert gate.begun == ["first"]


async def test_work_that_nobody_waits_for(workers: Workers, gate: Gate) -> None:
    """Cancelled work that waits is never done; what runs goes on, and the threads stay of use."""
    running = asyncio.create_task(workers.run(LARGE, A1, gate.work("running")))
    await _settled()
    waiting = asyncio.create_task(workers.run(LARGE, A1, gate.work("waiting")))
    await _settled()
    for task in (waiting, running):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert workers.waiting() == 0
    gate.open()
    assert await workers.run(LARGE, B1, lambda: "next") == "next"
    assert gate.begun == ["running"]
