"""The seam between a protocol that agent programs speak and the recording of their turns.

    body ── Dialect.parse ──▶ Asked.request ──▶ recorder ──▶ Answer ── Asked.reply, Asked.events ──▶ body

A dialect knows its protocol, and nothing of sessions, tokens or engines. Parsing is pure: the same bytes
always give the same messages, as a turn is found by the messages that it repeats.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tokentape_contracts.errors import InvalidRequest, TokentapeError, error_body
from tokentape_contracts.http import parse_object
from tokentape_core.domain.request import ChatRequest
from tokentape_core.domain.size import size_of_value

Json = dict[str, Any]
T = TypeVar("T")


class Answer(Protocol):
    """A recorded answer: an OpenAI chat completion, of which other dialects take what they need."""

    @property
    def completion(self) -> Mapping[str, Any]:
        """With one choice."""

    @property
    def written(self) -> bytes:
        """The same as JSON."""


class Asked(Protocol):
    """A parsed request, which knows how its client wants to be answered."""

    @property
    def request(self) -> ChatRequest: ...

    def reply(self, answer: Answer) -> bytes:
        """The answer as JSON."""

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The answer as server-sent events."""


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """One protocol.

    Attributes:
        name: `operationId` in the OpenAPI document.
        path: of its requests, below a session's URL.
        parse: reads a request's body; raises `InvalidRequest`.
        request_schema: of that body.
        reply_schema: of an answer that is no stream.
        error: the body of the reply to a request that failed.
        error_schema: of that; None for the API's own.
        refusal: the body of an engine's refusal → what the client gets, with its media type.
    """

    name: str
    path: str
    parse: Callable[[bytes], Asked]
    request_schema: Json
    reply_schema: Json
    error: Callable[[TokentapeError], Json] = error_body
    error_schema: Json | None = None
    refusal: Callable[[bytes, str], tuple[bytes, str]] = lambda body, media_type: (body, media_type)


def read_object(body: bytes) -> tuple[Json, int]:
    """A JSON object, and how many bytes of memory it takes, about.

    Raises:
        InvalidRequest: it is none.
    """
    fields = parse_object(body)
    is_plain = body.isascii() and b"\\u" not in body  # a byte of memory for each byte of text
    return fields, len(body) if is_plain else size_of_value(fields)


def take(fields: Json, name: str, kind: type[T], expected: str) -> T | None:
    """Takes a field out; None if it is absent or null.

    Raises:
        InvalidRequest: it is of another type; the text says which was expected.
    """
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {expected}")
    return value
