"""Child processes that answer messages: here small programs that answer, hang or die on demand."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.assembler.support import until
from tokentape_assembler.executor import ChildDied, ChildTimeout, Executor, ExecutorPool

ECHO = """
import json, os, sys, time
hello = sys.stdin.readline().strip()
if hello == "unhappy":
    print(json.dumps({"error": "no tokenizer at /nowhere"}), flush=True)
elif hello == "silent":
    sys.exit(3)
else:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "die": os._exit(9)
            case "hang": time.sleep(60)
            case "half": os.write(1, b"half an answer"); os._exit(0)
        print(line.strip()[::-1], flush=True)
"""
COMMAND = [sys.executable, "-c", ECHO]


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    executor = Executor(COMMAND, b"hello")
    await executor.start()
    yield executor
    await executor.close()


async def test_it_answers(executor: Executor) -> None:
    """Every message gets its own answer, from the same child, however long it is."""
    pid = executor.pid
    assert await executor.run(b"abc", 5) == b"cba\n"
    assert len(await executor.run(b"x" * 60_000, 5)) == 60_001
    assert executor.pid == pid


@pytest.mark.parametrize(("message", "code"), [(b"die", 9), (b"half", 0)])
async def test_a_crash(executor: Executor, message: bytes, code: int) -> None:
    """A child that ends without an answer is an error that says how it ended; the next one answers."""
    with pytest.raises(ChildDied, match=f"ended with exit code {code}"):
        await executor.run(message, 5)
    assert not executor.ready
    await until(lambda: executor.ready)
    assert await executor.run(b"abc", 5) == b"cba\n"


async def test_a_timeout(executor: Executor) -> None:
    """A child that takes too long is killed, and replaced."""
    pid = executor.pid
    with pytest.raises(ChildTimeout, match=r"after 0\.1 s"):
        await executor.run(b"hang", 0.1)
    await until(lambda: executor.ready)
    assert executor.pid != pid
    assert not psutil.pid_exists(pid or 0)


async def test_cancellation(executor: Executor) -> None:
    """Cancelling a run kills the child at once: an abandoned job takes no CPU."""
    pid = executor.pid or 0
    run = asyncio.create_task(executor.run(b"hang", 60))
    await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(lambda: not psutil.pid_exists(pid), timeout_s=1)
    await until(lambda: executor.ready)


LIVES_ON = """
import pathlib, sys
print(pathlib.Path(sys.stdin.readline().strip()).read_text(), flush=True)
for line in sys.stdin: print(line.strip()[::-1], flush=True)
"""


@pytest.mark.parametrize("said", ["nonsense", "[]", '{"error": "out of order"}'])
async def test_a_restart_that_fails(tmp_path: Path, said: str) -> None:
    """It is tried again until it succeeds, counted once each time, and leaves no child behind."""
    first_line, reasons, before = tmp_path / "line", list[str](), set(psutil.Process().children())
    first_line.write_text('{"ready": true}')
    executor = Executor([sys.executable, "-c", LIVES_ON], str(first_line).encode(), reasons.append)
    await executor.start()
    first_line.write_text(said)
    psutil.Process(executor.pid).kill()
    await until(lambda: reasons.count("failed_start") == 2)
    first_line.write_text('{"ready": true}')
    await until(lambda: executor.ready)
    assert reasons == ["killed", "failed_start", "failed_start"]
    assert {child.pid for child in set(psutil.Process().children()) - before} == {executor.pid}
    assert await executor.run(b"abc", 5) == b"cba\n"
    await executor.close()


async def test_an_idle_child_that_dies(executor: Executor) -> None:
    """A child that something kills between two messages is replaced without being asked for."""
    psutil.Process(executor.pid).kill()
    await until(lambda: not executor.ready)
    await until(lambda: executor.ready)
    assert await executor.run(b"abc", 5) == b"cba\n"


async def test_a_stopped_child_does_not_block_the_loop(executor: Executor) -> None:
    """A message that the child does not read leaves the event loop free."""
    psutil.Process(executor.pid).send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ChildTimeout):
        await executor.run(b"x" * 10_000_000, 0.2)
    assert time.monotonic() - started < 2


async def test_a_busy_child_takes_no_second_message(executor: Executor) -> None:
    """A message to a busy child is refused instead of mixing two answers."""
    run = asyncio.create_task(executor.run(b"hang", 60))
    await asyncio.sleep(0.01)
    with pytest.raises(ChildDied, match="not ready"):
        await executor.run(b"abc", 5)
    run.cancel()
    await asyncio.wait({run})


@pytest.mark.parametrize(
    ("hello", "reason"),
    [(b"unhappy", "no tokenizer at /nowhere"), (b"silent", "exit code 3 before it was ready")],
)
async def test_a_failed_start(hello: bytes, reason: str) -> None:
    """A child that cannot start up fails `start` with the reason that it gave."""
    pool = ExecutorPool(2, COMMAND, hello)
    with pytest.raises(ChildDied, match=reason):
        await pool.start()
    assert pool.ready == 0
    await pool.close()


async def test_a_pool() -> None:
    """A pool answers as many messages at the same time as it has children, and counts the living ones."""
    pool = ExecutorPool(2, COMMAND, b"hello")
    await pool.start()
    assert pool.ready == 2
    run = asyncio.create_task(pool.run(b"hang", 60))
    await asyncio.sleep(0.01)
    assert await pool.run(b"abc", 5) == b"cba\n"
    run.cancel()
    await asyncio.wait({run})
    assert pool.ready == 1
    await pool.close()
