"""Connections to the engine, over aiohttp.

With 32 connections a request costs less than a seventh of what httpx takes, whose pool looks at every idle
connection for every request.
"""

import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import aiohttp
import httpx
from yarl import URL

from tokentape_api.engine.port import Incoming
from tokentape_contracts import limits

_RECEIVE_BUFFER: Final = 128 * 1024
"""Of each connection. uvloop empties a socket without a pause: 6 MiB, which Linux allows by default, stop the
loop for 20 ms."""


class AiohttpNetwork:
    """The network. Connects when the first request is sent; keeps no cookies, follows no redirects."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def send(
        self, method: str, url: str, content: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Incoming]:
        self._session = self._session or _session()
        sent = {name: value if value.isascii() else _utf8(value) for name, value in headers.items()}
        return _Exchange(
            self._session.request(
                method, URL(url, encoded=True), data=content or None, headers=sent, allow_redirects=False
            )
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Exchange:
    """A request of aiohttp's, whose answer is read within it."""

    def __init__(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> None:
        self._request = request

    async def __aenter__(self) -> Incoming:
        response = await self._request.__aenter__()
        return Incoming(response.status, response.raw_headers, response.content.iter_any())

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)


def _utf8(value: str) -> str:
    """What aiohttp, which writes UTF-8, turns into the same bytes; others than UTF-8 it cannot write."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=limits.ENGINE_CONNECTIONS,
        keepalive_timeout=limits.ENGINE_KEEP_ALIVE_S,
        ssl=httpx.create_ssl_context(trust_env=False),
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=["Content-Type"],
        max_line_size=limits.HEAD_BYTES,
        max_field_size=limits.HEAD_BYTES,
        # The engine has one deadline for the whole answer; aiohttp's begins anew with every chunk.
        timeout=aiohttp.ClientTimeout(sock_connect=limits.ENGINE_CONNECT_S),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return connection
