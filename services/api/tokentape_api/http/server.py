"""uvicorn's HTTP server with bounds on what a client sends and takes, and an end that breaks no request off.

llhttp takes a URL and headers of any length, and whoever reaches the port could fill the memory with them.
uvicorn waits for ever for a request that has not come to its end, as its only timer begins with an answer and
ends with the next byte, and for a client that takes nothing of its answer. It closes idle connections the
moment that it is told to end, with requests that are on their way. And it tells an application that the
client has gone only if a task waits for that.
"""

import asyncio
import logging
import socket
from typing import Final

from uvicorn import Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokentape_api.http.bodies import STALLED
from tokentape_api.http.connected import HANGUP, Hangup
from tokentape_contracts import limits

log = logging.getLogger("tokentape.api")

_REST: Final = 64
"""Method, version and line ends: what the parser does not tell of."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and hangs up once a request's head is longer than `limits.HEAD_BYTES`, or takes longer than
    `limits.REQUEST_HEAD_S`. A body that pauses for `limits.REQUEST_BODY_S` gets the extension `STALLED`.

    A connection has one timer, uvicorn's own, and a request that comes in one piece does not touch it.

    When the server ends, a connection stays for the request that it has, or for one that comes within
    `limits.LAST_REQUEST_S`; the answer says that it closes. Requests have the extension `HANGUP`.
    """

    _head_bytes = 0
    """Of the head that is being read: what the parser has told of it, or what came in if that is more."""
    _is_in_head = True
    _completed = 0
    """Requests that have been read."""
    _is_last = False
    _ends: float | None = None
    """Until when the head must be here that has begun, or the rest of a body that was answered before."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._hangup = Hangup(self.flow.resume_reading)
        self._wait_for_a_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._hangup.come()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANGUP: self._hangup}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._ends = False, None
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes, self._is_in_head, self._ends = 0, True, None
        self._completed += 1

    def data_received(self, data: bytes) -> None:
        before, was_in_head = (self._completed, self._head_bytes), self._is_in_head
        super().data_received(data)
        # A header that has not ended yet is kept by the parser, which tells nobody how long it is.
        if was_in_head and self._is_in_head and before[0] == self._completed:
            self._head_bytes = max(self._head_bytes, before[1] + len(data))
            if self._head_bytes > limits.HEAD_BYTES + _REST and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")
        if not self._is_in_head or self.cycle is None or self.cycle.response_complete:
            self._bound(self._is_in_head and before[0] != self._completed)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is None and not self._is_in_head:  # the next request has begun
            self._bound(False)

    def shutdown(self) -> None:
        self._is_last = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(limits.LAST_REQUEST_S, super().shutdown)
        else:
            super().shutdown()

    def _bound(self, is_idle: bool) -> None:
        """Bounds the wait for what is missing: uvicorn has just ended its timer, or has begun none."""
        if self.transport.is_closing():
            return
        if is_idle:
            self._wait_for_a_request()
        elif not self._is_in_head and not self.cycle.response_complete:
            self._wait_for_a_body()
        else:
            if self._ends is None:
                bound_s = limits.REQUEST_HEAD_S if self._is_in_head else limits.REQUEST_BODY_S
                self._ends = self.loop.time() + bound_s
            self.timeout_keep_alive_task = self.loop.call_at(self._ends, self._is_late)

    def _wait_for_a_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _wait_for_a_body(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(limits.REQUEST_BODY_S, self._has_stalled)

    def _has_stalled(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._wait_for_a_body()
            return
        self.cycle.scope["extensions"][STALLED] = {}
        self.cycle.keep_alive = False
        self.cycle.message_event.set()

    def _is_late(self) -> None:
        if self._is_in_head and not self.transport.is_closing():
            self.send_400_response("The head of the request did not come to its end in time.")
        else:
            self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > limits.HEAD_BYTES:
            raise ValueError("the head of the request is too long")  # uvicorn makes a 400 of it


class BoundedServer(Server):
    """Cuts a connection whose client takes nothing of its answer for `limits.REPLY_STALL_S`.

    TCP's user timeout (RFC 5482) does, which Linux has: it covers a client that reads no more as well as a
    host that is gone. And the server says where it listens: `port` may have been 0.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
                    timeout_ms = int(limits.REPLY_STALL_S * 1000)
                    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
                host, port = listening.getsockname()[:2]
                log.info("the API listens at http://%s:%s", host, port)
