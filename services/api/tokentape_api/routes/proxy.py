"""The catch-all: anything else under `/sessions/{sid}/…` goes to the engine."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokentape_api.bodies import read_body
from tokentape_api.engine.port import Forwarded
from tokentape_api.services import Services
from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest, RouteNotFound, SessionDeleted

_OWN = frozenset({"", "samples", "v1/chat/completions"})
"""Paths below a session that are ours."""


async def forward(request: Request) -> Response:
    """Forwards a request of an existing session, unrecorded, to the same path under the engine's URL."""
    services: Services = request.app.state.services
    session_id, path = request.path_params["sid"], request.path_params["path"]
    if path.strip("/") in _OWN:
        # A slash too many: forwarded, it would reach the engine and be recorded nowhere.
        raise RouteNotFound(f"there is no {request.url.path}; leave out the trailing slash")
    if any(part in (".", "..") for part in path.split("/")) or not path.isprintable():
        raise InvalidRequest("the path may not leave the engine's root")
    state = await services.sessions.load(session_id)
    if state.sealed is not None:
        raise SessionDeleted("the session was deleted")
    body = await read_body(request, limits.PROXY_BODY_BYTES)
    stack = AsyncExitStack()
    forwarded = await stack.enter_async_context(
        services.engine.forward(
            session_id, request.method, quote(path), request.url.query, request.headers, body
        )
    )
    return StreamingResponse(_body(stack, forwarded), forwarded.status, forwarded.headers)


async def _body(stack: AsyncExitStack, forwarded: Forwarded) -> AsyncIterator[bytes]:
    async with stack:
        async for chunk in forwarded.body:
            yield chunk
