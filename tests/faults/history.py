"""What the clients sent and what they were told, in the order in which they heard it."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

COLLECT_S: Final = 20.0
"""`deadline_s` of a collect."""

Kind = Literal["open", "chat", "collect", "delete"]

UNCLEAR_CODES = frozenset({"store_unavailable"})
"""Errors that leave open whether a turn was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request and its outcome.

    Attributes:
        kind: what was asked.
        session: id of the session; of `open` the one that was given, or "".
        began, ended: seconds on one clock for all clients.
        deadline_s: within this it had to end.
        status: of the answer; None if there was none.
        code, detail: our error code and its message, or "".
        error: why there was no answer.
        retry: header `x-should-retry` of an error.
        retry_after: header `Retry-After`.
        mode: of `open`.
        attempt: of `chat`: a mark in the request that is kept in the recorded turn.
        continues: of `chat`: `response_id` of the turn whose conversation it continues; "" begins one.
        streams: of `chat`: the client asked for server-sent events, which tell no tokens. An answer that
            breaks off is none: `status` is None.
        response_id, text: of an answered chat: the engine's id, and the message.
        output: of an answered chat: `(token, log-prob)` as the client got them.
        prompt_digest: of an answered chat: the engine's digest of the prompt tokens.
        payload, digest, contract: of an answered collect.
        asked: body of `collect`, without its deadline.
        handed: of a collect by the driver: the tokens of each sample that it made; None if it made none.
    """

    kind: Kind
    session: str
    began: float
    ended: float
    deadline_s: float
    status: int | None
    code: str = ""
    detail: str = ""
    error: str = ""
    retry: str = ""
    retry_after: str = ""
    mode: str = ""
    attempt: str = ""
    continues: str = ""
    streams: bool = False
    response_id: str = ""
    text: str = ""
    output: tuple[tuple[int, float], ...] = ()
    prompt_digest: str = ""
    payload: bytes = field(default=b"", repr=False)
    digest: str = ""
    contract: int = 1
    asked: dict[str, Any] = field(default_factory=dict)
    handed: tuple[tuple[int, ...], ...] | None = None

    @property
    def ok(self) -> bool:
        """The client was told that it was done."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def unclear(self) -> bool:
        """The client was not told whether it was done."""
        return self.status is None or self.code in UNCLEAR_CODES

    def __str__(self) -> str:
        told = f"{self.status} {self.code} {self.detail}".strip() if self.status is not None else self.error
        what = self.attempt or self.response_id
        return f"{self.kind} {what} [{self.began:.3f}–{self.ended:.3f}] of session {self.session}: {told}"


class History:
    """Calls; append-only. `started` counts those that have not ended too."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.started = 0

    def add(self, call: Call) -> None:
        self.calls.append(call)

    def of(self, kind: Kind, session: str | None = None) -> list[Call]:
        """The calls of one kind, of one session if it is given, in the order of their end."""
        return [c for c in self.calls if c.kind == kind and session in (None, c.session)]

    @property
    def sessions(self) -> list[str]:
        """The sessions that a client was given."""
        return [call.session for call in self.of("open") if call.ok]
