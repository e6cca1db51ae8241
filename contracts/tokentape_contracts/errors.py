"""Every error of Tokentape, on both sides of the wire.

    TokentapeError
    ├── RequestError            the caller must change something
    │   ├── InvalidRequest          400  a body or a parameter is wrong
    │   ├── CannotExtend            400  the conversation does not continue the recording
    │   ├── AnswerAltered           400  a recorded answer came back as another one
    │   ├── HeadChanged             400  other tools or template arguments than the conversation began with
    │   ├── Unauthenticated         401  no token, or an unknown one
    │   ├── Forbidden               403  the token's scopes do not allow it
    │   ├── SessionNotFound         404  no such session
    │   ├── SessionDeleted          404  the session was deleted
    │   ├── RouteNotFound           404  no such path
    │   ├── MethodNotAllowed        405  the path exists, the method does not
    │   ├── ContractUnsupported     406  no common version of the samples format
    │   ├── SessionFull             409  the session holds as many turns as it may
    │   ├── TurnTruncated           409  a turn that was cut at its length cannot be continued
    │   ├── PromptTooLong           413  the text of a prompt is above its limit
    │   ├── RequestTooLarge         413  the body is above its limit
    │   ├── HookFailed              422  a pick or finish hook raised, or broke its contract
    │   ├── PrefixBroken            422  a turn's prompt does not begin with its parent's tokens
    │   └── ReplayBroken            422  the routing replay rows of a path do not meet
    ├── RetryableError          nothing is wrong with the request: send it again later
    │   ├── TooManySessions         429  the tenant has as many open sessions as it may
    │   ├── AssemblyFailed          503  the worker's child process died
    │   ├── EngineUnavailable       503  the inference engine cannot be reached
    │   ├── GenerationAborted       503  the engine interrupted the generation
    │   ├── Overloaded              503  the API process has as much work as it may hold
    │   ├── QueueFull               503  as many collects wait as may wait
    │   ├── StoreUnavailable        503  Redis cannot be reached or refuses writes
    │   ├── DeadlineExceeded        504  the samples were not ready in time
    │   └── EngineTimeout           504  the engine did not answer in time
    └── ServerFault             someone must mend the installation, or our code
        ├── EngineReplyInvalid      502  the engine's answer cannot be recorded
        ├── EventUnsupported        500  the stream holds an event of a newer version
        ├── TemplateMismatch        500  the session was opened with another tokenizer or template
        ├── MatcherFailed           500  a matcher raised, or answered neither true nor false
        ├── StreamCorrupt           500  the stream breaks an invariant
        └── InternalError           500  a defect of Tokentape

The server raises these classes and `error_body` writes them; the driver reads the body back with
`error_from_body` and raises the same class. `TABLE` is the only place that knows HTTP statuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar


class Actor(StrEnum):
    """Who must act for the error to go away."""

    CALLER = "caller"
    """The agent or the driver: the same request will fail again."""
    NOBODY = "nobody"
    """Nobody: the same request may be sent again."""
    OPERATOR = "operator"
    """Whoever runs the service or the engine: a setting is wrong or a part is down."""
    MAINTAINER = "maintainer"
    """The authors of Tokentape: please report it."""


class TokentapeError(Exception):
    """The root of the tree.

    Args:
        detail: one sentence for a person: what was wrong, where, and what to change. Half characters, which
            no reply could carry, become their escapes: it may quote a stranger.
    """

    code: ClassVar[str] = ""

    def __init__(self, detail: str) -> None:
        detail = detail.encode(errors="backslashreplace").decode()
        super().__init__(detail)
        self.detail = detail


class RequestError(TokentapeError):
    """The caller must change something."""


class InvalidRequest(RequestError):
    code = "invalid_request"


class CannotExtend(RequestError):
    code = "cannot_extend"


class AnswerAltered(RequestError):
    code = "answer_altered"


class HeadChanged(RequestError):
    code = "head_changed"


class Unauthenticated(RequestError):
    code = "unauthenticated"


class Forbidden(RequestError):
    code = "forbidden"


class SessionNotFound(RequestError):
    code = "session_not_found"


class SessionDeleted(RequestError):
    code = "session_deleted"


class RouteNotFound(RequestError):
    code = "route_not_found"


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"


class ContractUnsupported(RequestError):
    code = "contract_unsupported"


class SessionFull(RequestError):
    code = "session_full"


class TurnTruncated(RequestError):
    code = "turn_truncated"


class PromptTooLong(RequestError):
    code = "prompt_too_long"


class RequestTooLarge(RequestError):
    code = "request_too_large"


class HookFailed(RequestError):
    code = "hook_failed"


class PrefixBroken(RequestError):
    code = "prefix_broken"


class ReplayBroken(RequestError):
    code = "replay_broken"


class RetryableError(TokentapeError):
    """Nothing is wrong with the request: it may be sent again."""


class TooManySessions(RetryableError):
    code = "too_many_sessions"


class AssemblyFailed(RetryableError):
    code = "assembly_failed"


class EngineUnavailable(RetryableError):
    code = "engine_unavailable"


class GenerationAborted(RetryableError):
    code = "generation_aborted"


class Overloaded(RetryableError):
    code = "overloaded"


class QueueFull(RetryableError):
    code = "queue_full"


class StoreUnavailable(RetryableError):
    code = "store_unavailable"


class DeadlineExceeded(RetryableError):
    code = "deadline_exceeded"


class EngineTimeout(RetryableError):
    code = "engine_timeout"


class ServerFault(TokentapeError):
    """Someone must mend the installation, or our code."""


class EngineReplyInvalid(ServerFault):
    code = "engine_reply_invalid"


class EventUnsupported(ServerFault):
    code = "event_unsupported"


class TemplateMismatch(ServerFault):
    code = "template_mismatch"


class MatcherFailed(ServerFault):
    code = "matcher_failed"


class StreamCorrupt(ServerFault):
    code = "stream_corrupt"


class InternalError(ServerFault):
    code = "internal_error"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one error travels: its HTTP status, whether to send the same request again, and who acts."""

    status: int
    retryable: bool
    actor: Actor


TABLE: Mapping[type[TokentapeError], Rule] = {
    InvalidRequest: Rule(400, False, Actor.CALLER),
    CannotExtend: Rule(400, False, Actor.CALLER),
    AnswerAltered: Rule(400, False, Actor.CALLER),
    HeadChanged: Rule(400, False, Actor.CALLER),
    Unauthenticated: Rule(401, False, Actor.CALLER),
    Forbidden: Rule(403, False, Actor.CALLER),
    SessionNotFound: Rule(404, False, Actor.CALLER),
    SessionDeleted: Rule(404, False, Actor.CALLER),
    RouteNotFound: Rule(404, False, Actor.CALLER),
    MethodNotAllowed: Rule(405, False, Actor.CALLER),
    ContractUnsupported: Rule(406, False, Actor.CALLER),
    SessionFull: Rule(409, False, Actor.CALLER),
    TurnTruncated: Rule(409, False, Actor.CALLER),
    PromptTooLong: Rule(413, False, Actor.CALLER),
    RequestTooLarge: Rule(413, False, Actor.CALLER),
    HookFailed: Rule(422, False, Actor.OPERATOR),
    PrefixBroken: Rule(422, False, Actor.CALLER),
    ReplayBroken: Rule(422, False, Actor.OPERATOR),
    TooManySessions: Rule(429, True, Actor.NOBODY),
    AssemblyFailed: Rule(503, True, Actor.NOBODY),
    EngineUnavailable: Rule(503, True, Actor.OPERATOR),
    GenerationAborted: Rule(503, True, Actor.NOBODY),
    Overloaded: Rule(503, True, Actor.NOBODY),
    QueueFull: Rule(503, True, Actor.NOBODY),
    StoreUnavailable: Rule(503, True, Actor.OPERATOR),
    DeadlineExceeded: Rule(504, True, Actor.NOBODY),
    EngineTimeout: Rule(504, True, Actor.NOBODY),
    EngineReplyInvalid: Rule(502, False, Actor.OPERATOR),
    EventUnsupported: Rule(500, False, Actor.OPERATOR),
    TemplateMismatch: Rule(500, False, Actor.OPERATOR),
    MatcherFailed: Rule(500, False, Actor.OPERATOR),
    StreamCorrupt: Rule(500, False, Actor.MAINTAINER),
    InternalError: Rule(500, False, Actor.MAINTAINER),
}

BY_CODE: Mapping[str, type[TokentapeError]] = {error.code: error for error in TABLE}

if len(BY_CODE) != len(TABLE) or "" in BY_CODE:
    raise RuntimeError("every error of the table needs a code of its own")


def rule_of(error: TokentapeError) -> Rule:
    """The table's row for an error."""
    return TABLE[type(error)]


def error_body(error: TokentapeError) -> dict[str, Any]:
    """The JSON body of an error reply.

    The outer shape is the OpenAI API's (`error.message`, `type`, `param`, `code`), so that its SDKs show the
    message; `retryable` and `actor` are ours.
    """
    rule = rule_of(error)
    return {
        "error": {
            "message": error.detail,
            "type": type(error).__name__,
            "param": None,
            "code": error.code,
            "retryable": rule.retryable,
            "actor": rule.actor.value,
        }
    }


def error_from_body(body: object) -> TokentapeError | None:
    """The error that `error_body` wrote, or None if the body is somebody else's."""
    inner = body.get("error") if isinstance(body, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("message"), str):
        return None
    error = BY_CODE.get(str(inner.get("code")))
    return error(inner["message"]) if error else None


def text_of(error: BaseException) -> str:
    """What an error of a library says, or its name if it says nothing."""
    return str(error) or type(error).__name__
