"""Replies: JSON, and errors in one shape."""

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokentape_api.dialects import dialect_at
from tokentape_api.engine import EngineRefusal
from tokentape_api.telemetry import CLIENT_GONE, ENGINE_REFUSED
from tokentape_contracts import limits
from tokentape_contracts.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    Overloaded,
    QueueFull,
    RouteNotFound,
    TokentapeError,
    TooManySessions,
    Unauthenticated,
    error_body,
    rule_of,
)
from tokentape_contracts.http import RETRY_HEADER
from tokentape_core import logs

log = logging.getLogger(__name__)

JSON = "application/json"
_HEADERS: Mapping[type[TokentapeError], Mapping[str, str]] = {
    Overloaded: {"Retry-After": str(limits.OVERLOADED_RETRY_AFTER_S)},
    QueueFull: {"Retry-After": str(limits.QUEUE_RETRY_AFTER_S)},
    TooManySessions: {"Retry-After": str(limits.SESSIONS_RETRY_AFTER_S)},
    Unauthenticated: {"WWW-Authenticate": "Bearer"},
}
"""What HTTP wants beside the body of some errors."""
_RETRYABLE_STATUSES = frozenset({408, 409, 429})


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply; numpy arrays become lists."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, media_type=JSON)


def error_response(error: TokentapeError, path: str) -> Response:
    """The reply of an error: status and retry header from the table, the body in the dialect of the path."""
    rule, dialect = rule_of(error), dialect_at(path)
    logs.note(code=error.code)
    headers = {RETRY_HEADER: "true" if rule.retryable else "false", **_HEADERS.get(type(error), {})}
    body = dialect.error(error) if dialect else error_body(error)
    return json_response(body, rule.status, headers)


async def on_tokentape_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for our errors."""
    if not isinstance(error, TokentapeError):
        raise error
    if rule_of(error).status == 500:
        log.error("%s: %s", error.code, error.detail, exc_info=error)
    return error_response(error, request.scope["path"])


async def on_engine_refusal(request: Request, error: Exception) -> Response:
    """The engine's own status and, in a dialect that is the engine's, its body."""
    if not isinstance(error, EngineRefusal):
        raise error
    logs.note(code=ENGINE_REFUSED)
    retryable = error.status in _RETRYABLE_STATUSES or error.status >= 500
    headers = {RETRY_HEADER: "true" if retryable else "false"}
    body, media_type = error.body, error.content_type
    if (dialect := dialect_at(request.scope["path"])) is not None:
        body, media_type = dialect.refusal(body, media_type)
    return Response(body, error.status, headers, media_type=media_type)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own complaints, in our shape."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.scope["path"]
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(RouteNotFound(f"there is no {where}"), path)
    if error.status_code == 405:
        return error_response(MethodNotAllowed(f"{where}: the path has no such method"), path)
    return error_response(InvalidRequest(f"{where}: {error.detail}"), path)


async def on_client_gone(_: Request, __: Exception) -> Response:
    """Nobody reads it: the client closed the connection. The status is nginx's for the log."""
    logs.note(code=CLIENT_GONE)
    return Response(status_code=499)


async def on_defect(request: Request, error: Exception) -> Response:
    """Anything else is a defect of ours; the log has the traceback."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(
        InternalError("a defect of Tokentape; its log has the traceback"), request.scope["path"]
    )
