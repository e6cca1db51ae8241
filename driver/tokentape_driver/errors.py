"""What the driver raises.

    TokentapeError
    ├── RequestError, RetryableError, ServerFault and the classes below them (`tokentape_contracts.errors`):
    │                           the server refused, and said why; raised exactly as the server raised them
    └── DriverError             there is no reply of the server that can be used, or none that was wanted
        ├── TransportError          no answer: refused, reset, unresolvable, cut off
        ├── CollectTimeout          the collect's total deadline passed
        ├── UnexpectedReply         an answer that is not Tokentape's (a proxy's page), or a malformed payload
        ├── ContractMismatch        the reply is not what its headers say, or not what was asked for
        └── TokensLeftOut           sampled tokens are in no sample, and the caller wanted that to be an error
    ValueError
    ├── LeftoverState           the input sample still carries what an earlier rollout computed
    ├── CannotOverlay           the user's sample class has no place for a computed value
    ├── MissingRolloutId        tree mode: the input sample has nothing by which its siblings would be known
    └── InvalidBatch            samples that are put together do not fit: nesting, rollout ids, rewards, masks

None of them is retried here. Every class survives pickling, attributes included: trainers raise them in
remote workers.
"""

from collections.abc import Mapping
from typing import Final

import httpx
import orjson

from tokentape_contracts import limits
from tokentape_contracts.accounting import Accounting
from tokentape_contracts.errors import InvalidRequest, TokentapeError, error_from_body

_NOTHING_SAMPLED: Final = Accounting(generations=0, sampled_tokens=0, trained_tokens=0)


class DriverError(TokentapeError):
    """There is no reply of the server that can be used, or none that was wanted."""


class TransportError(DriverError):
    """The server gave no answer; whether it acted on the request is unknown.

    Attributes:
        stage: what was being done: `open`, `collect` or `delete`.
        host: `host:port` that was addressed.
    """

    def __init__(self, detail: str, *, stage: str = "", host: str = "") -> None:
        super().__init__(detail)
        self.stage = stage
        self.host = host


class CollectTimeout(DriverError):
    """The collect's total deadline passed on this side; the server's own 504 is `DeadlineExceeded`.

    Attributes:
        deadline_s: the deadline in seconds, from the first byte sent to the last sample built.
        server_timing: the reply's `Server-Timing`, if its headers had come by then.
    """

    def __init__(self, detail: str, *, deadline_s: float = 0.0, server_timing: str | None = None) -> None:
        super().__init__(detail)
        self.deadline_s = deadline_s
        self.server_timing = server_timing


class UnexpectedReply(DriverError):
    """An answer that Tokentape does not give.

    Attributes:
        status: the HTTP status.
        text: the first 500 characters of the body; empty for a binary one.
    """

    def __init__(self, detail: str, *, status: int = 0, text: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.text = text


class ContractMismatch(DriverError):
    """The reply is not what its headers say (digest), or not what was asked for (version, mode)."""


class TokensLeftOut(DriverError):
    """Sampled tokens are not trained by any sample, and `on_left_out` is `raise`.

    Attributes:
        accounting: what became of every sampled token of the session.
        session_id: the session, which is deleted; until its retention ends an audit can still read it.
    """

    def __init__(
        self, detail: str, *, accounting: Accounting = _NOTHING_SAMPLED, session_id: str = ""
    ) -> None:
        super().__init__(detail)
        self.accounting = accounting
        self.session_id = session_id


class LeftoverState(ValueError):
    """The input sample still carries computed state, which the new rollout would silently replace or keep.

    Attributes:
        field: the sample's field, or `metadata.<key>`.
    """

    def __init__(self, detail: str, *, field: str = "") -> None:
        super().__init__(detail)
        self.field = field


class CannotOverlay(ValueError):
    """The user's sample class has no place for a computed value.

    Attributes:
        field: the field that cannot be set.
    """

    def __init__(self, detail: str, *, field: str = "") -> None:
        super().__init__(detail)
        self.field = field


class MissingRolloutId(ValueError):
    """Tree mode: `rollout_id` and `index` of the input sample are both None."""


class InvalidBatch(ValueError):
    """Samples that are put together do not fit: their nesting, rollout ids, rewards or masks.

    Attributes:
        position: the list or sample, e.g. `output[3][1]`.
    """

    def __init__(self, detail: str, *, position: str = "") -> None:
        super().__init__(detail)
        self.position = position


def ensure_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `InvalidRequest` for an argument that is none of its choices."""
    if value not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def error_of_reply(response: httpx.Response, stage: str) -> TokentapeError:
    """The error that a non-2xx reply stands for: the server's own class, else `UnexpectedReply`."""
    where = _where(response, stage)
    try:
        error = error_from_body(orjson.loads(response.content))
    except orjson.JSONDecodeError:
        error = None
    if error is None:
        error = unexpected(response, stage, "the body carries no error code of Tokentape")
    else:
        error.add_note(where)
    return error


def unexpected(response: httpx.Response, stage: str, why: str, *, quote: bool = True) -> UnexpectedReply:
    """An `UnexpectedReply` that quotes the body's beginning."""
    text = response.text[: limits.DRIVER_QUOTED_BODY_CHARS] if quote else ""
    detail = f"{_where(response, stage)}: {why}" + (f": {text}" if text else "")
    return UnexpectedReply(detail, status=response.status_code, text=text)


def transport_error(error: httpx.RequestError, stage: str, url: httpx.URL) -> TransportError:
    """The `TransportError` for what httpx raised."""
    host = url.netloc.decode("ascii")
    cause = str(error) or "no further detail"
    return TransportError(f"{stage}: {host}: {type(error).__name__}: {cause}", stage=stage, host=host)


def collect_timeout(
    deadline_s: float, url: httpx.URL, headers: Mapping[str, str] | None, received: int
) -> CollectTimeout:
    """A `CollectTimeout` that says how far the reply had come.

    Args:
        headers: the reply's, or None if they had not come.
        received: bytes of the body that had come.
    """
    timing = headers.get("Server-Timing") if headers is not None else None
    progress = "no reply headers yet" if headers is None else f"{received} bytes of the body had come"
    if timing:
        progress += f", Server-Timing: {timing}"
    return CollectTimeout(
        f"collect: {url.netloc.decode('ascii')}: the driver's total deadline of {deadline_s:g} s passed "
        f"({progress})",
        deadline_s=deadline_s,
        server_timing=timing,
    )


def _where(response: httpx.Response, stage: str) -> str:
    request = response.request
    return f"{stage}: {request.method} {request.url}: HTTP {response.status_code}"
