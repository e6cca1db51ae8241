"""Connections to the engine.

Generations go over aiohttp: with 32 connections a request costs less than a seventh of what httpx takes,
whose pool looks at every idle connection for every request. The catch-all goes over httpx, which sends a path
as it is given.
"""

import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import aiohttp
import httpx

from tokentape_api.engine.port import Incoming
from tokentape_contracts import limits

_RECEIVE_BUFFER: Final = 128 * 1024
"""Of each connection. uvloop empties a socket without a pause: 6 MiB, which Linux allows by default, stop the
loop for 20 ms."""


class AiohttpGenerations:
    """Generations over aiohttp. Connects when the first request is sent; keeps no cookies."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def post(
        self, url: str, content: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Incoming]:
        self._session = self._session or _session()
        sent = {name: value if value.isascii() else _utf8(value) for name, value in headers.items()}
        return _Exchange(self._session.post(url, data=content, headers=sent, allow_redirects=False))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Exchange:
    """A request of aiohttp's, whose answer is read within it."""

    def __init__(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> None:
        self._request = request

    async def __aenter__(self) -> Incoming:
        response = await self._request.__aenter__()
        return Incoming(response.status, response.headers, response.content.iter_any())

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
        # The engine has one deadline for the whole answer; aiohttp's begins anew with every chunk.
        timeout=aiohttp.ClientTimeout(sock_connect=limits.ENGINE_CONNECT_S),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return connection


def forwarding_transport() -> httpx.AsyncBaseTransport:
    """Connects when the first request is sent."""
    connections = limits.ENGINE_CONNECTIONS
    return httpx.AsyncHTTPTransport(
        limits=httpx.Limits(
            max_connections=connections,
            max_keepalive_connections=connections,
            keepalive_expiry=limits.ENGINE_KEEP_ALIVE_S,
        ),
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)],
        trust_env=False,
    )
