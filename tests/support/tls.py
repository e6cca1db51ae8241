"""TLS in front of a server that has none."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_HANDSHAKE: Final = b"\x16"
"""The first byte of TLS."""


@contextmanager
def terminated(context: ssl.SSLContext, port: int, *, plain: bool = False) -> Iterator[int]:
    """Listens with TLS on loopback, in a thread of its own, and forwards to a port; yields its own port.

    Args:
        plain: forwards what comes without TLS as well, from servers that know none.
    """
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(accepted: socket.socket) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.callback(accepted.close)
            has_tls = not plain or await _first_byte(accepted) == _HANDSHAKE
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=context if has_tls else None
            )
            stack.pop_all()
            stack.callback(transport.abort)
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(server_writer.transport.abort)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    async def accept() -> None:
        while True:
            accepted, _ = await loop.sock_accept(listener)
            task = loop.create_task(serve(accepted))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    accepting = loop.create_task(accept())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:

        async def close() -> None:
            for task in (accepting, *tasks):
                task.cancel()
            await asyncio.gather(accepting, *tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # transports close in the loop's next turns

        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        listener.close()


async def _first_byte(accepted: socket.socket) -> bytes:
    """What a client says first; it stays there to be read."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return accepted.recv(1, socket.MSG_PEEK)
        await asyncio.sleep(0.005)
