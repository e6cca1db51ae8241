"""Reading request bodies within their limits, and checking a chat request."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from tokentape_api.http.access import caller_of
from tokentape_api.http.connected import while_connected
from tokentape_api.work import Sender, Workers
from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest, Overloaded, RequestTooLarge
from tokentape_contracts.http import marks_in, parse_object
from tokentape_core.domain.position import Head
from tokentape_core.domain.size import size_of_value

T = TypeVar("T")

_FOR_TEMPLATE: Final = ("reasoning_effort", "enable_thinking")
"""Fields of a request that the chat template must get as well as the engine."""
STALLED: Final = "tokentape.stalled"
"""Name of the ASGI extension that a request gets when its body has paused for `limits.REQUEST_BODY_S`."""


class Bodies:
    """Reads the bodies of requests within their limits, and all of them within one more.

    Args:
        workers: parse what would hold up the event loop.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.held = 0
        """Bytes of all bodies whose block has not ended, or what they say takes in memory if that is more."""

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """The request's body, which counts until the block ends.

        Raises:
            RequestTooLarge: it is longer than `limit` bytes; reading stops there.
            Overloaded: all bodies together are above `limits.BODIES_BYTES`.
            InvalidRequest: it paused for too long. Only `BoundedHttp` tells.
            ClientDisconnect: the client is gone.
        """
        with self._held() as hold:
            yield await _read(request, limit, hold)

    @asynccontextmanager
    async def parsed(
        self,
        request: Request,
        limit: int,
        parse: Callable[[bytes], T],
        size: Callable[[T], int] = lambda _: 0,
    ) -> AsyncIterator[tuple[T, int]]:
        """What `parse` makes of the request's body, which is read, and counts, as with `read`; and its cost.

        The cost of parsing it, or of comparing what it says, is in bytes that would take as long to tokenise.

        Args:
            size: bytes of memory that what was parsed takes; 0 if that is no more than the body's.

        Raises:
            Overloaded: also where no thread is free for a long body.
            TokentapeError: what `parse` raises.
        """
        sender = Sender(caller_of(request).tenant, request.path_params.get("sid", ""))
        with self._held() as hold:
            body = await _read(request, limit, hold)
            cost, work = _cost(body), partial(parse, body)
            parsed = await while_connected(request, self._workers.run(cost, sender, work))
            hold(max(0, size(parsed) - len(body)))
            del body, work  # nobody needs them for as long as what they say
            yield parsed, cost

    @contextmanager
    def _held(self) -> Iterator[Callable[[int], None]]:
        """What is told of bytes that are held until the block ends, and refuses them if they are too many."""
        size = 0

        def hold(more: int) -> None:
            nonlocal size
            size += more
            self.held += more
            if self.held > limits.BODIES_BYTES:
                raise Overloaded(
                    f"this process works on requests of {limits.BODIES_BYTES} bytes already; send it again"
                )

        try:
            yield hold
        finally:
            self.held -= size


def _is_plain(body: bytes) -> bool:
    """Whether the texts in a JSON body take no more memory than they are long: one byte a character."""
    return body.isascii() and b"\\u" not in body


def _cost(body: bytes) -> int:
    # A short body cannot hold so many values that it would be worth counting them.
    return len(body) // 64 + (marks_in(body) if len(body) > 2 * limits.WORK_INLINE_BYTES else 0)


async def _read(request: Request, limit: int, hold: Callable[[int], None]) -> bytes:
    """A body; `hold` hears of the length of each piece, and may refuse it."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise RequestTooLarge(f"the body is longer than {limit} bytes")
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        hold(len(chunks[-1]))
        size += len(chunks[-1])
        if size > limit:
            raise RequestTooLarge(f"the body is longer than {limit} bytes")
        more = message.get("more_body", False)
        if more and STALLED in request.scope.get("extensions", ()):
            raise InvalidRequest(f"nothing of the body's rest came for {limits.REQUEST_BODY_S:g} s")
    return b"".join(chunks)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat request.

    Attributes:
        messages: the whole conversation, at least one message.
        head: its tools, and arguments for the chat template.
        stream: whether the client wants server-sent events.
        include_usage: whether these end with the token counts.
        fields: everything else, for the engine.
        size: bytes of memory that it takes.
    """

    messages: list[dict[str, Any]]
    head: Head
    stream: bool
    include_usage: bool
    fields: Mapping[str, Any]
    size: int

    @classmethod
    def parse(cls, body: bytes) -> "ChatRequest":
        """Checks what the recording depends on; sampling parameters are the engine's to judge.

        Raises:
            InvalidRequest: what is wrong, and where.
        """
        fields = parse_object(body)
        size = len(body) if _is_plain(body) else size_of_value(fields)
        messages = fields.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{index}] must be an object with a role")
        if fields.get("n") not in (None, 1) or isinstance(fields.get("n"), bool):
            raise InvalidRequest("n must be 1: a turn has one answer")
        if _optional(fields, "continue_final_message", bool, "true or false"):
            raise InvalidRequest(
                "continue_final_message is not supported: an answer begins with the first token of its turn"
            )
        tools = _optional(fields, "tools", list, "a list")
        template_kwargs = _template_kwargs(fields)
        fields = {name: value for name, value in fields.items() if value is not None}
        stream = _optional(fields, "stream", bool, "true or false") or False
        options = _optional(fields, "stream_options", dict, "an object") or {}
        include_usage = options.get("include_usage") is True
        return cls(messages, Head(tools, template_kwargs), stream, include_usage, fields, size)


def _template_kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs`, and what stands beside it for the engine and is the template's business too.

    An engine reads `reasoning_effort` "none" as thinking switched off, under either name that templates have
    for it (SGLang's request class); a prompt that says otherwise would not fit the engine's parser.
    """
    given = _optional(fields, "chat_template_kwargs", dict, "an object") or {}
    beside = {name: fields[name] for name in _FOR_TEMPLATE if fields.get(name) is not None}
    if beside.get("reasoning_effort") == "none":
        beside = {"thinking": False, "enable_thinking": False, **beside}
    return {**beside, **{name: value for name, value in given.items() if value is not None}}


def _optional(fields: dict[str, Any], name: str, kind: type, expected: str) -> Any:
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {expected}")
    return value
