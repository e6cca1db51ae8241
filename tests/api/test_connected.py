"""Work for a client that may go away."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request

from tokentape_api.http.connected import HANGUP, Hangup, while_connected


def _request(hangup: Hangup) -> Request:
    return Request({"type": "http", "extensions": {HANGUP: hangup}})


async def _work(began: asyncio.Event, seconds: float = 60.0) -> str:
    began.set()
    await asyncio.sleep(seconds)
    return "done"


async def test_work_goes_on_to_its_end() -> None:
    """With a client that stays, and where nobody tells whether it does; a later hangup changes nothing."""
    listened: list[int] = []
    hangup = Hangup(lambda: listened.append(1))
    assert await while_connected(_request(hangup), _work(asyncio.Event(), 0.0)) == "done"
    assert listened == [1], "the server must read on, or it does not notice"
    hangup.come()
    await asyncio.sleep(0)
    assert await while_connected(Request({"type": "http"}), _work(asyncio.Event(), 0.0)) == "done"


async def test_a_hangup_cancels_the_work() -> None:
    """At once, and the task that did it goes on with `ClientDisconnect`."""
    hangup, began = Hangup(lambda: None), asyncio.Event()
    task = asyncio.create_task(while_connected(_request(hangup), _work(began)))
    await began.wait()
    hangup.come()
    with pytest.raises(ClientDisconnect):
        await task
    assert not task.cancelled()


async def test_after_a_hangup_nothing_begins() -> None:
    """A client may have gone while its body was being read."""
    hangup, began = Hangup(lambda: None), asyncio.Event()
    hangup.come()
    with pytest.raises(ClientDisconnect):
        await while_connected(_request(hangup), _work(began))
    assert not began.is_set()


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_task_that_is_to_end_ends(is_gone: bool) -> None:
    """Whoever else cancels it, also together with a hangup."""
    hangup, began = Hangup(lambda: None), asyncio.Event()
    task = asyncio.create_task(while_connected(_request(hangup), _work(began)))
    await began.wait()
    if is_gone:
        hangup.come()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
