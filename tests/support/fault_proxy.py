"""A TCP proxy before Redis, or before an HTTP server, that does harm.

It waits, breaks off, holds back, and says when it saw a command.

It runs in a thread of its own, so that tests with and without an event loop can use it, and so that it goes
on while a test waits for a process.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self

Moment = Literal["before", "inside", "after", "amid", "beside"]
"""When a rule strikes: before any of the command reaches the server, when a part of it has, when the server
has answered and the answer has not been passed on, or amid the answer, when the beginning of it has. In each
of these cases the connection then breaks; `beside` only says that the command came, and passes it on.
"""

OF_EVENTS: Final = rb"XADD\r\n\$\d+\r\ntt:\{[0-9a-f]+\}:events\r\n"
TURN: Final = re.compile(OF_EVENTS + rb"\$10\r\nNOMKSTREAM\r\n\$\d+\r\n\d{1,6}-0\r\n")
"""An XADD of a turn."""
SEAL: Final = re.compile(OF_EVENTS + rb"\$10\r\nNOMKSTREAM\r\n\$41\r\n")
"""An XADD of a seal."""
RESULT: Final = re.compile(rb"HSET\r\n\$\d+\r\ntt:\{[0-9a-f]+\}:samples:")
"""A result that is written."""
ANNOUNCEMENT: Final = re.compile(rb"XADD\r\n\$\d+\r\ntt:replies:")
"""A result that is announced."""
ENQUEUE: Final = re.compile(rb"PSETEX\r\n\$\d+\r\narq:job:")
"""A job that is put into the queue."""
RENEWAL: Final = re.compile(rb"PEXPIRE\r\n\$\d+\r\narq:in-progress:")
"""A worker holds on to a job that it runs."""

GENERATION: Final = re.compile(rb'"input_ids":\[[\d,]*\]')
"""A whole request for a generation, as the engine gets it."""
STREAM: Final = re.compile(rb'"stream":true\}$')
"""A whole chat request of an agent that streams."""

_CHUNK: Final = 1 << 20
_INSIDE_BYTES: Final = 7
"""How much of a command's arguments the server sees that gets a part of it."""
_AMID_BYTES: Final = 400
"""How much of an answer is passed on before it breaks: an HTTP head and some of its body."""
_AMID_S: Final = 2.0
"""How long that much of it is waited for."""


@dataclass
class Rule:
    """One fault, which strikes once.

    Attributes:
        pattern: of the command.
        moment: see `Moment`.
        then: called in the proxy's thread when it strikes, before the connection breaks; it may not wait.
        struck: set when it has.
    """

    pattern: "re.Pattern[bytes]"
    moment: Moment
    then: Callable[[], None] = lambda: None
    struck: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """Forwards to a server on 127.0.0.1, until told otherwise.

    Args:
        target: the server's port; may be changed, for connections that begin later.

    Attributes:
        delay_s: called for every request; it is forwarded after so many seconds. None forwards at once.
        connections, strikes: how many there were.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_s: Callable[[], float] | None = None
        self.connections = 0
        self.strikes = 0
        self._rules: list[Rule] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listening = threading.Event()
        self.port = 0

    def strike(
        self, pattern: "re.Pattern[bytes]", moment: Moment, then: Callable[[], None] = lambda: None
    ) -> Rule:
        """Arms a fault for the next request that the pattern is found in."""
        rule = Rule(pattern, moment, then)
        self._rules.append(rule)
        return rule

    def disarm(self) -> None:
        """Forgets the faults that have not struck, and every delay."""
        self._rules.clear()
        self.delay_s = None

    def cut(self) -> None:
        """Breaks every connection, with whatever is on its way."""
        self._loop.call_soon_threadsafe(self._cut)

    def hold(self) -> None:
        """Holds back all requests until `release`; connections stay."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def url(self, url: str) -> str:
        """A Redis URL of the server, by way of this proxy."""
        return re.sub(r":\d+/", f":{self.port}/", url)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(5):
            raise RuntimeError("the proxy does not listen")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stopped.wait()
        server.close()
        tasks = list(self._tasks)
        self._cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled unbegun

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_writer: asyncio.StreamWriter | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
            back = asyncio.create_task(_copy(server_reader, writer))
            there = asyncio.create_task(self._requests(reader, writer, server_reader, server_writer, back))
            tasks += [there, back]
            await asyncio.wait({there})
        except OSError:
            pass  # the server is away: so is the connection
        finally:
            if server_writer is not None:
                server_writer.transport.abort()  # first: a second cancellation ends the wait below
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
        back: "asyncio.Task[None]",
    ) -> None:
        """Forwards requests until either side, or a rule, ends it."""
        while True:
            reading = asyncio.create_task(reader.read(_CHUNK))
            await asyncio.wait({reading, back}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            if not (request := reading.result()):
                return
            await self._open.wait()
            if self.delay_s is not None:
                await asyncio.sleep(self.delay_s())
            for rule in [*self._rules]:
                if not (found := rule.pattern.search(request)):
                    continue
                self._rules.remove(rule)
                self.strikes += 1
                if rule.moment != "beside":
                    await self._break(rule, request, found.end(), server_reader, server_writer, writer, back)
                    return
                rule.then()
                rule.struck.set()
            server_writer.write(request)
            await server_writer.drain()

    async def _break(
        self,
        rule: Rule,
        request: bytes,
        where: int,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        back: "asyncio.Task[None]",
    ) -> None:
        if rule.moment == "inside":
            server_writer.write(request[: where + _INSIDE_BYTES])
            await server_writer.drain()
        elif rule.moment in ("after", "amid"):
            back.cancel()
            await asyncio.wait({back})
            server_writer.write(request)
            await server_writer.drain()
            if rule.moment == "after":
                await server_reader.read(1)
            else:
                # A shorter answer is lost.
                with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError):
                    async with asyncio.timeout(_AMID_S):
                        writer.write(await server_reader.readexactly(_AMID_BYTES))
        rule.then()
        rule.struck.set()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while reply := await reader.read(_CHUNK):
            writer.write(reply)
            await writer.drain()
