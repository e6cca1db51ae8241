"""Everything that the API does: one row each.

Routing, access, the labels of metrics, the OpenAPI document and what the catch-all leaves alone follow from
these rows. A new route is a row here and a handler in `routes`; a new dialect a row in `dialects`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokentape_api import dialects, schemas
from tokentape_api.dialects.port import Dialect
from tokentape_api.routes import chat, health, metrics, proxy, samples, sessions
from tokentape_api.schemas import Json, reply
from tokentape_contracts.http import ACCEPT_CONTRACT_HEADER

Handler = Callable[[Request], Awaitable[Response]]

_SESSION: Final = "/sessions/{sid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that the API does.

    Attributes:
        name: method and path, as metrics, logs and documents have it. ANY takes every method.
        handler: answers a request.
        scope: what a caller's token must have; None for an operation that takes no token.
        id: `operationId` in the OpenAPI document; none for what OpenAPI cannot express.
        summary: one line.
        replies: status → what OpenAPI says of it, other than errors.
        codes: of the errors that it may answer with.
        parameters: other than the session's id, as OpenAPI has them.
        body: schema of the request's.
        needs_body: whether that may not be empty.
        error: schema of an error's body; None for the API's own.
    """

    name: str
    handler: Handler
    scope: str | None
    id: str = ""
    summary: str = ""
    replies: Mapping[str, Json] = field(default_factory=dict)
    codes: Sequence[str] = ()
    parameters: Sequence[Json] = ()
    body: Json | None = None
    needs_body: bool = False
    error: Json | None = None

    @property
    def method(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.name.partition(" ")[2]

    @property
    def below_session(self) -> str | None:
        """The path below a session's URL; None for an operation that has none."""
        return self.path.removeprefix(f"{_SESSION}/") if self.path.startswith(f"{_SESSION}/") else None


def operations() -> tuple[Operation, ...]:
    """All of them; first the ones that are asked most, as a router tries them in this order."""
    own = (*map(_turn, dialects.DIALECTS), *_OPERATIONS)
    ours = frozenset({"", *(operation.below_session for operation in own if operation.below_session)})
    forward = Operation(
        name=f"ANY {_SESSION}/{{path}}", scope="agent", handler=partial(proxy.forward, ours=ours)
    )
    return (*own, forward)


_ACCESS: Final = ("unauthenticated", "forbidden")
_FOUND: Final = ("session_not_found", "session_deleted", "store_unavailable")
_READ: Final = ("event_unsupported", "stream_corrupt", "internal_error")


def _turn(dialect: Dialect) -> Operation:
    """Generates and records a turn, in one dialect."""
    return Operation(
        name=f"POST {_SESSION}/{dialect.path}",
        handler=partial(chat.turn, dialect=dialect),
        scope="agent",
        id=dialect.name,
        summary="Generates and records one turn",
        body=dialect.request_schema,
        needs_body=True,
        replies={
            "200": {
                "description": "The engine's answer, once the turn is recorded. What an engine refuses is "
                "passed on with its own status and body.",
                "content": {
                    "application/json": {"schema": dialect.reply_schema},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            }
        },
        codes=(
            *(*_ACCESS, *_FOUND, *_READ),
            *("invalid_request", "cannot_extend", "answer_altered", "head_changed", "session_full"),
            *("turn_truncated", "request_too_large", "prompt_too_long", "overloaded"),
            *("matcher_failed", "template_mismatch", "engine_reply_invalid", "engine_unavailable"),
            *("generation_aborted", "engine_timeout"),
        ),
        error=dialect.error_schema,
    )


_OPERATIONS: Final = (
    Operation(
        name="GET /health",
        handler=health.health,
        scope=None,
        id="health",
        summary="The process lives",
        replies={"200": reply("The event loop turns.", schemas.HEALTH)},
    ),
    Operation(
        name="GET /ready",
        handler=health.ready,
        scope=None,
        id="ready",
        summary="Redis answers, and the engine has sent what the recording needs",
        replies={
            "200": reply("Requests may be sent here.", schemas.ready(True)),
            "503": reply("Something is missing.", schemas.ready(False)),
        },
    ),
    Operation(
        name="GET /metrics",
        handler=metrics.metrics,
        scope=None,
        id="metrics",
        summary="Metrics of this process, in Prometheus's text format",
        replies={"200": reply("All metrics.", {"type": "string"}, "text/plain")},
    ),
    Operation(
        name="POST /sessions",
        handler=sessions.open_session,
        scope="driver",
        id="openSession",
        summary="Opens a session",
        body=schemas.OPEN_REQUEST,
        replies={"200": reply("The session is open.", schemas.OPENED)},
        codes=(
            *(*_ACCESS, "invalid_request", "request_too_large", "too_many_sessions", "store_unavailable"),
            *("overloaded", "internal_error"),
        ),
    ),
    Operation(
        name=f"GET {_SESSION}",
        handler=sessions.get_session,
        scope="driver",
        id="showSession",
        summary="Shows what was recorded",
        parameters=(
            {
                "name": "view",
                "in": "query",
                "description": "`events`: the events themselves, in place of the turns as requests and "
                "responses.",
                "schema": {"type": "string"},
            },
        ),
        replies={"200": reply("What was recorded.", schemas.SHOWN)},
        codes=(*_ACCESS, *_FOUND, *_READ, "invalid_request", "overloaded"),
    ),
    Operation(
        name=f"DELETE {_SESSION}",
        handler=sessions.delete_session,
        scope="driver",
        id="deleteSession",
        summary="Ends a session; may be repeated",
        replies={"204": {"description": "It is ended."}},
        codes=(*_ACCESS, "session_not_found", "store_unavailable", *_READ),
    ),
    Operation(
        name=f"POST {_SESSION}/samples",
        handler=samples.collect_samples,
        scope="driver",
        id="collectSamples",
        summary="Assembles the training samples",
        parameters=(
            {
                "name": ACCEPT_CONTRACT_HEADER,
                "in": "header",
                "description": "The versions of the samples format that the client reads: numbers, with "
                "commas between them. 1 without it.",
                "schema": {"type": "string"},
            },
        ),
        body=schemas.SAMPLES_REQUEST,
        replies={
            "200": {
                **reply(
                    "One safetensors container: see samples.md.",
                    {"type": "string", "contentMediaType": "application/octet-stream"},
                    "application/octet-stream",
                ),
                "headers": schemas.SAMPLES_HEADERS,
            }
        },
        codes=(
            *(*_ACCESS, *_FOUND, *_READ),
            *("invalid_request", "contract_unsupported", "request_too_large", "hook_failed", "prefix_broken"),
            *("replay_broken", "assembly_failed", "queue_full", "overloaded", "deadline_exceeded"),
        ),
    ),
)
