"""The loop that API and workers run on has errors of its own for a connection that breaks off."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from threading import Thread

import pytest
import uvloop

from tests.support.sessions import opened
from tokentape_contracts import limits
from tokentape_contracts.errors import StoreUnavailable
from tokentape_core.store import RedisStore, connect

AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""
CLIENTS = 100
"""Of which some write when uvloop has noticed the reset already."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that resets every connection, in a thread: between any two steps of the client."""

    def reset_all(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                connection.close()

    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as server:
        thread = Thread(target=reset_all, args=(server,))
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_server_that_resets_every_connection_is_unavailable(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a balancer without a server, which takes a connection and resets it."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.4)

    async def outcomes() -> list[object]:
        clients = [connect(f"redis://127.0.0.1:{port}/0") for _ in range(CLIENTS)]
        calls = [RedisStore(client).open(f"s{number}", opened()) for number, client in enumerate(clients)]
        found: list[object] = await asyncio.gather(*calls, return_exceptions=True)
        for client in clients:
            await client.aclose()
        return found

    assert {type(outcome) for outcome in uvloop.run(outcomes())} == {StoreUnavailable}
