"""The catch-all: anything else under `/sessions/{sid}/…` goes to the engine."""

import re
from collections.abc import Container
from contextlib import AsyncExitStack, suppress
from typing import Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tokentape_api.engine.port import Forwarded
from tokentape_api.http.access import caller_of
from tokentape_api.http.connected import while_connected
from tokentape_api.services import Services
from tokentape_contracts import limits
from tokentape_contracts.errors import Forbidden, InvalidRequest, RouteNotFound, SessionDeleted

GENERATING: Final = frozenset(
    {
        "api/chat",
        "api/generate",
        "chat/completions",
        "completions",
        "generate",
        "generate_from_file",
        "inference/v1/generate",
        "invocations",
        "v1/audio/transcriptions",
        "v1/audio/translations",
        "v1/batches",
        "v1/completions",
        "v1/interactions",
        "v1/messages",
        "v1/realtime",
        "v1/responses",
        "vertex_generate",
    }
)
"""Paths at which SGLang, vLLM and their routers generate; what came of it would be recorded nowhere."""

HARMLESS: Final = frozenset(
    {
        "detokenize",
        "get_model_info",
        "health",
        "model_info",
        "ping",
        "tokenize",
        "v1/detokenize",
        "v1/models",
        "v1/tokenize",
        "version",
    }
)
"""Paths that the scope `agent` reaches. At the others an engine may be paused, reloaded or shut down, or show
its own key: a token that lies in an agent's sandbox must not do that."""

_ESCAPE: Final = re.compile("%[0-9A-Fa-f]{2}")


async def forward(request: Request, ours: Container[str]) -> Response:
    """Forwards a request of an existing session, unrecorded, to the same path under the engine's URL.

    Args:
        ours: paths below a session that the API answers itself.
    """
    services: Services = request.app.state.services
    session_id, path = request.path_params["sid"], request.path_params["path"]
    query = request.scope["query_string"].decode("latin-1")
    _check(path, query)
    name = "/".join(part for part in path.split("/") if part).lower()
    if name in ours:
        # A slash too many: forwarded, it would reach the engine and be recorded nowhere.
        raise RouteNotFound(f"there is no {request.scope['path']}; spell it without the superfluous slash")
    if name in GENERATING:
        raise RouteNotFound(
            f"{path} is not forwarded: nobody would record what the engine generates there. Use "
            "v1/chat/completions"
        )
    if path.startswith("/") or "//" in path:
        raise InvalidRequest("the path has an empty part: two slashes in a row")
    if name not in HARMLESS and not name.startswith("v1/models/") and not caller_of(request).may("admin"):
        raise Forbidden(f"{path} of the engine needs the scope 'admin'")
    state = await services.sessions.load(session_id, is_shown=True)
    if state.sealed is not None:
        raise SessionDeleted("the session was deleted")
    stack = AsyncExitStack()
    async with services.bodies.read(request, limits.PROXY_BODY_BYTES) as body:
        answer = services.engine.forward(
            session_id, request.method, quote(path), query, request.headers, body
        )
        incoming = await while_connected(request, stack.enter_async_context(answer))
    return _Passed(request, stack, incoming)


def _check(path: str, query: str) -> None:
    """Refuses what an engine, or a router before it, could read as another path than we do.

    Args:
        path: decoded once.

    Raises:
        InvalidRequest: what is wrong.
    """
    if len(path) + len(query) > limits.PROXY_TARGET_CHARS:
        raise InvalidRequest(f"path and query are longer than {limits.PROXY_TARGET_CHARS} characters")
    if not path.isprintable() or "\ufffd" in path or not (query.isascii() and query.isprintable()):
        raise InvalidRequest("path and query must be printable characters in UTF-8, percent-encoded")
    if ";" in path:
        raise InvalidRequest("the path has a parameter (;), which some servers cut off and others do not")
    if any(part in (".", "..") for part in re.split(r"[/\\]", path)):
        raise InvalidRequest("the path may not leave the engine's root")
    if _ESCAPE.search(path):
        raise InvalidRequest("the path is percent-encoded twice")


class _Passed(StreamingResponse):
    """The engine's answer as it comes in. A client that goes away ends it at once.

    Args:
        stack: ends the engine's request.
    """

    def __init__(self, request: Request, stack: AsyncExitStack, incoming: Forwarded) -> None:
        super().__init__(incoming.body, incoming.status, incoming.headers)
        self._request = request
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with suppress(ClientDisconnect):
            async with self._stack:
                await while_connected(self._request, self.stream_response(send))
