"""Child processes that answer messages, and that can be killed and rebuilt."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Final

import orjson

from tokentape_contracts import limits

_RESTART_DELAY_S: Final = 1.0
_EXIT_TIMEOUT_S: Final = 1.0

log = logging.getLogger("tokentape.assembler")


class ExecutorError(Exception):
    """A child process gave no answer; says why."""


class ChildDied(ExecutorError):
    """The child ended, or never became ready."""


class ChildTimeout(ExecutorError):
    """The child was killed because it took too long."""


class Executor:
    """One child process, which answers one message at a time.

    A child that ended, for whatever reason, is replaced by a new one. The child ends with this process, also
    if this process is killed: it sees its stdin end.

    Args:
        command: program and arguments. The program reads `hello`, answers with a line that holds
            `{"ready": true}` or `{"error": why}`, and then answers every line with a line.
        hello: the first line that the child gets, without its end. Secrets go here, not on a command line.
        restarted: hears why a child is replaced: it `exited`, was `killed` by somebody else, or by us after a
            `timeout` or as its message was `abandoned`; `failed_start`: the next attempt follows.
    """

    def __init__(
        self, command: Sequence[str], hello: bytes, restarted: Callable[[str], None] = lambda _: None
    ) -> None:
        self._command = command
        self._hello = hello
        self._restarted = restarted
        self._killed_for = ""
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ready = False
        self._busy = False

    @property
    def ready(self) -> bool:
        """Whether a message would be taken: the child runs and has started up."""
        return self._ready

    @property
    def idle(self) -> bool:
        """Whether it is ready and no message is being answered."""
        return self._ready and not self._busy

    @property
    def pid(self) -> int | None:
        """Process id of the current child."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the child and waits until it is ready; from then on it is kept alive.

        Raises:
            ChildDied: it did not become ready; with the reason that it gave.
            ValueError: its first line is no JSON object.
        """
        self._keeper = asyncio.create_task(self._keep_alive(await self._spawn()))

    async def run(self, message: bytes, timeout_s: float) -> bytes:
        """The child's answer to one message (a line without its end). Cancelling kills the child.

        Raises:
            ChildDied: the child is not ready, or ended before it answered.
            ChildTimeout: there was no answer within `timeout_s`; the child has been killed.
        """
        process = self._process
        if process is None or not self.idle:
            raise ChildDied("the child process is not ready")
        self._busy = True
        answer = b""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await _ask(process, message)
            if not answer:
                raise ChildDied(f"the child process {await _ending(process)}")
        except TimeoutError:
            self._note(process, "timeout")
            raise ChildTimeout(f"the child process was ended after {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._note(process, "abandoned")
            raise
        finally:
            self._busy = False
            if not answer:
                # Whatever the child still does belongs to this message: it cannot take another one.
                self._ready = self._ready and self._process is not process
                _kill(process)
        return answer

    async def close(self) -> None:
        """Ends the child for good. Nothing may be running."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        self._ready = False
        if self._process is not None:
            _kill(self._process)
            await self._process.wait()

    def _note(self, process: asyncio.subprocess.Process, reason: str) -> None:
        if process.returncode is None:  # else it has ended by itself
            self._killed_for = reason

    async def _keep_alive(self, process: asyncio.subprocess.Process) -> None:
        while True:
            await process.wait()
            self._ready = False
            log.warning("child %s; a new one is started", await _ending(process))
            by = "killed" if (process.returncode or 0) < 0 else "exited"
            self._restarted(self._killed_for or by)
            self._killed_for = ""
            process = await self._next()

    async def _next(self) -> asyncio.subprocess.Process:
        while True:
            try:
                return await self._spawn()
            except (ChildDied, OSError, ValueError) as error:
                log.error("child cannot be started, next attempt in %g s: %s", _RESTART_DELAY_S, error)
                self._restarted("failed_start")
                await asyncio.sleep(_RESTART_DELAY_S)

    async def _spawn(self) -> asyncio.subprocess.Process:
        # A session of its own: a terminal's Ctrl-C goes to this process only, which then drains.
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            await self._greet(process)
            self._ready = True
        finally:
            if not self._ready:
                _kill(process)
        return process

    async def _greet(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(limits.CHILD_START_S):
                answer = await _ask(process, self._hello)
        except TimeoutError:
            raise ChildDied(f"it was not ready within {limits.CHILD_START_S:g} s") from None
        if not answer:
            raise ChildDied(f"it {await _ending(process)} before it was ready")
        said = orjson.loads(answer)
        if not isinstance(said, dict):
            raise ValueError("its first line is no JSON object")
        if error := said.get("error"):
            raise ChildDied(error)


class ExecutorPool:
    """Executors of the same kind.

    Args:
        size: how many messages are answered at the same time.
    """

    def __init__(
        self,
        size: int,
        command: Sequence[str],
        hello: bytes,
        restarted: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.executors = [Executor(command, hello, restarted) for _ in range(size)]

    @property
    def ready(self) -> int:
        """How many children have started up and run, busy or not."""
        return sum(executor.ready for executor in self.executors)

    async def start(self) -> None:
        """Starts all children. Raises `ChildDied` if one did not become ready."""
        starts = (executor.start() for executor in self.executors)
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def run(self, message: bytes, timeout_s: float) -> bytes:
        """`Executor.run` on an idle child; `ChildDied` if there is none."""
        executor = next((executor for executor in self.executors if executor.idle), self.executors[0])
        return await executor.run(message, timeout_s)

    async def close(self) -> None:
        """Ends all children."""
        await asyncio.gather(*(executor.close() for executor in self.executors))


async def _ask(process: asyncio.subprocess.Process, message: bytes) -> bytes:
    """One line in, one line out; empty if the child is gone."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the child was started without pipes")
    try:
        process.stdin.write(message + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
    except ConnectionError:
        return b""
    return line if line.endswith(b"\n") else b""


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _ending(process: asyncio.subprocess.Process) -> str:
    """How the child ended. One that closed its pipes but lives on is killed."""
    try:
        async with asyncio.timeout(_EXIT_TIMEOUT_S):
            returncode = await process.wait()
    except TimeoutError:
        _kill(process)
        returncode = await process.wait()
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"
