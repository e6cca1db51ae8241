"""Connections to the engine.

Generations go over aiohttp, by an adapter that keeps httpx's interface: with 32 connections a request costs a
seventh of the CPU that httpx's own pool takes, which looks at every idle connection for every request. The
catch-all goes over httpx's own transport, which sends a path as it is given.
"""

import socket
from typing import Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from tokentape_contracts import limits

_RECEIVE_BUFFER: Final = 128 * 1024
"""Of each connection. uvloop empties a socket without a pause: 6 MiB, which Linux allows by default, stop the
loop for 20 ms."""


def generation_transport() -> httpx.AsyncBaseTransport:
    """Connects when the first request is sent. Never sends a POST twice, and keeps no cookies."""
    return AiohttpTransport(client=_session)


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=limits.ENGINE_CONNECTIONS,
        keepalive_timeout=limits.ENGINE_KEEP_ALIVE_S,
        ssl=httpx.create_ssl_context(trust_env=False),
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


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
