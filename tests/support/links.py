"""The network between servers: a proxy before each, which knows replicas and Sentinels from clients."""

import asyncio
import contextlib
import re
import threading
from types import TracebackType
from typing import Final, Self

_SERVERS: Final = re.compile(rb"PSYNC|REPLCONF|sentinel-[0-9a-f]{8}-")
"""What a replica, or a Sentinel, says before anything else that matters."""
_REPLICA: Final = re.compile(rb"PSYNC")
_CHUNK: Final = 1 << 18


class Links:
    """Forwards to servers on 127.0.0.1, each behind a port of its own.

    Attributes:
        lag_s: what a server sends to its replicas arrives so much later. When the server dies, what is on its
            way is lost.
    """

    def __init__(self) -> None:
        self.lag_s = 0.0
        self._isolated: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._of_servers: set[asyncio.Task[None]] = set()
        self._ports: dict[int, int] = {}
        self._listening: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def port(self, target: int) -> int:
        """Where this server is reached by way of here."""
        return asyncio.run_coroutine_threadsafe(self._listen(target), self._loop).result(5)

    def isolate(self, target: int) -> None:
        """Drops whatever it and replicas or Sentinels send each other. Its clients reach it as before."""
        self._loop.call_soon_threadsafe(self._isolated.add, target)

    def join(self, target: int) -> None:
        """Ends its isolation. The connections that missed something are broken."""

        def cut() -> None:
            self._isolated.discard(target)
            for task in self._of_servers:
                if self._tasks[task] == target:
                    task.cancel()

        self._loop.call_soon_threadsafe(cut)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def close() -> None:
            for server in self._listening:
                server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # transports close in the loop's next turns

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self, target: int) -> int:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(target, reader, writer))
            self._tasks[task] = target
            task.add_done_callback(self._tasks.pop)
            task.add_done_callback(self._of_servers.discard)
            task.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled unbegun

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._listening.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_writer: asyncio.StreamWriter | None = None
        back: asyncio.Task[None] | None = None
        replica = asyncio.Event()
        own = asyncio.current_task()
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", target)
            back = asyncio.create_task(self._back(target, server_reader, writer, replica))
            back.add_done_callback(lambda _: own.cancel() if own else None)
            while request := await reader.read(_CHUNK):
                if own is not None and _SERVERS.search(request):
                    self._of_servers.add(own)
                if _REPLICA.search(request):
                    replica.set()
                if target in self._isolated and own in self._of_servers:
                    continue
                server_writer.write(request)
                await server_writer.drain()
        except OSError:
            pass  # one side is gone: so is the connection
        finally:
            if back is not None:
                back.cancel()
            if server_writer is not None:
                server_writer.transport.abort()

    async def _back(
        self,
        target: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        replica: asyncio.Event,
    ) -> None:
        """Passes answers on. What is for a replica is held back; it dies with the connection."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while reply := await reader.read(_CHUNK):
                if target in self._isolated and replica.is_set():
                    continue
                if self.lag_s and replica.is_set():
                    loop.call_later(self.lag_s, self._late, writer, reply)
                    continue
                writer.write(reply)
                await writer.drain()

    def _late(self, writer: asyncio.StreamWriter, reply: bytes) -> None:
        if not writer.transport.is_closing():
            writer.write(reply)
