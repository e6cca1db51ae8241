"""A TCP proxy that breaks connections on demand."""

import asyncio
import contextlib
from types import TracebackType


class BreakingProxy:
    """Forwards to a server on 127.0.0.1; `break_after` arms one fault.

    Armed with a byte string, it forwards the next request that holds it, waits until the server has answered
    (`executed`), swallows the answer, waits until it may break (`may_break`) and closes the connection: the
    client cannot know whether the command was done.
    """

    def __init__(self, port: int) -> None:
        self.connections = 0
        self.executed = asyncio.Event()
        self.may_break = asyncio.Event()
        self.may_break.set()
        self._target = port
        self._marker: bytes | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def break_after(self, marker: bytes) -> None:
        """Arms the fault for the next request that contains `marker`."""
        self._marker = marker

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> "BreakingProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        back = asyncio.create_task(_copy(server_reader, writer))
        try:
            while request := await reader.read(1 << 20):
                server_writer.write(request)
                if self._marker is not None and self._marker in request:
                    self._marker = None
                    back.cancel()
                    await asyncio.wait([back])
                    await server_reader.read(1)
                    self.executed.set()
                    await self.may_break.wait()
                    return
        finally:
            back.cancel()
            for stream in (server_writer, writer):
                stream.close()
            for stream in (server_writer, writer):
                with contextlib.suppress(OSError):
                    await stream.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while reply := await reader.read(1 << 20):
        writer.write(reply)
        await writer.drain()
