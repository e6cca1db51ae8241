"""Reading request bodies within their limits, and checking a chat request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest, RequestTooLarge
from tokentape_contracts.http import parse_object
from tokentape_core.domain.position import Head

_FOR_TEMPLATE: Final = ("reasoning_effort", "enable_thinking")
"""Fields of a request that the chat template must get as well as the engine."""
STALLED: Final = "tokentape.stalled"
"""Name of the ASGI extension that a request gets when its body has paused for `limits.REQUEST_BODY_S`."""


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        RequestTooLarge: it is longer than `limit` bytes; reading stops there.
        InvalidRequest: it paused for too long. Only `BoundedHttp` tells.
        ClientDisconnect: the client is gone.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    chunks: list[bytes] = []
    if size <= limit:
        size, more = 0, True
        while more and size <= limit:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            size, more = size + len(chunks[-1]), message.get("more_body", False)
            if more and STALLED in request.scope.get("extensions", ()):
                raise InvalidRequest(f"nothing of the body's rest came for {limits.REQUEST_BODY_S:g} s")
    if size > limit:
        raise RequestTooLarge(f"the body is longer than {limit} bytes")
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
    """

    messages: list[dict[str, Any]]
    head: Head
    stream: bool
    include_usage: bool
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, body: bytes) -> "ChatRequest":
        """Checks what the recording depends on; sampling parameters are the engine's to judge.

        Raises:
            InvalidRequest: what is wrong, and where.
        """
        fields = parse_object(body)
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
        return cls(messages, Head(tools, template_kwargs), stream, include_usage, fields)


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
