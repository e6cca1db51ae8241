"""A worker's HTTP endpoint: `/metrics`, and `/health` and `/ready` for whoever supervises it.

It runs on the worker's own event loop, so that an answer says that the loop turns. It speaks just enough HTTP
for probes and scrapes: one GET a connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any, Final

import orjson
import redis.asyncio

from tokentape_assembler.telemetry import Telemetry
from tokentape_contracts import limits
from tokentape_core.metrics import CONTENT_TYPE

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""

_JSON: Final = "application/json"

log = logging.getLogger("tokentape.assembler")


class Endpoint:
    """Answers while the block lasts.

    Args:
        clients: to Redis, where the sessions and where the queue is.
        children: how many child processes could run a job.
        port: 0 takes a free one; the log says which.

    Raises:
        ValueError: the port cannot be used; on entry.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        clients: Collection[redis.asyncio.Redis],
        children: Callable[[], int],
        host: str,
        port: int,
    ) -> None:
        self._telemetry = telemetry
        self._clients = clients
        self._children = children
        self._address = host, port
        self._server: asyncio.Server | None = None
        self._routes: Mapping[bytes, Callable[[], Awaitable[Answer]]] = {
            b"/metrics": self._metrics,
            b"/health": self._health,
            b"/ready": self._ready,
        }

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port = self._address[1]
        return int(self._server.sockets[0].getsockname()[1]) if self._server else port

    async def __aenter__(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._serve, *self._address, limit=limits.WORKER_HEAD_BYTES
            )
        except OSError as error:
            raise ValueError(f"metrics-port: {error}") from error
        log.info("metrics and probes at http://%s:%s", self._address[0], self.port)

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A peer that is gone, sends no head or too long a one, gets no answer.
        gone = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with closing(writer), suppress(*gone):
            async with asyncio.timeout(limits.WORKER_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status, content_type, body = await self._answer(head)
            writer.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()

    async def _answer(self, head: bytes) -> Answer:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, _JSON, b"{}"
        route = self._routes.get(path)
        return await route() if route else (HTTPStatus.NOT_FOUND, _JSON, b"{}")

    async def _metrics(self) -> Answer:
        return HTTPStatus.OK, CONTENT_TYPE, await asyncio.to_thread(self._telemetry.meter.expose)

    async def _health(self) -> Answer:
        return HTTPStatus.OK, _JSON, b'{"status":"ok"}'

    async def _ready(self) -> Answer:
        children = self._children()
        checks: dict[str, Any] = {
            "redis": await self._redis(),
            "children": "ok" if children else "no child process is ready",
        }
        is_ready = all(state == "ok" for state in checks.values())
        body = orjson.dumps({"ready": is_ready, "checks": checks})
        return HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, _JSON, body

    async def _redis(self) -> str:
        try:
            async with asyncio.timeout(limits.READY_TIMEOUT_S):
                for client in self._clients:
                    await client.ping()
        except TimeoutError:
            return f"no answer within {limits.READY_TIMEOUT_S:g} s"
        except redis.exceptions.RedisError as error:
            return f"Redis does not answer: {type(error).__name__}"
        return "ok"
