"""OpenAI's chat completions: the dialect of most agent programs, and of the recording itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from tokentape_api.dialects.port import Answer, Dialect, Json, read_object, take
from tokentape_contracts.errors import InvalidRequest
from tokentape_core.domain.position import Head
from tokentape_core.domain.request import ChatRequest

_FOR_TEMPLATE: Final = ("reasoning_effort", "enable_thinking")
"""Fields of a request that the chat template must get as well as the engine."""


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A request for a chat completion.

    Attributes:
        include_usage: whether a stream ends with the token counts.
        include_logprobs: whether it has the log-probs of its tokens, as the engine gave them.
    """

    request: ChatRequest
    include_usage: bool
    include_logprobs: bool

    @classmethod
    def parse(cls, body: bytes) -> "ChatCompletion":
        """Checks what the recording depends on; sampling parameters are the engine's to judge.

        Raises:
            InvalidRequest: what is wrong, and where.
        """
        fields, size = read_object(body)
        messages = fields.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{index}] must be an object with a role")
        if fields.get("n") not in (None, 1) or isinstance(fields.get("n"), bool):
            raise InvalidRequest("n must be 1: a turn has one answer")
        if take(fields, "continue_final_message", bool, "true or false"):
            raise InvalidRequest(
                "continue_final_message is not supported: an answer begins with the first token of its turn"
            )
        tools = take(fields, "tools", list, "a list")
        head = Head(tools, _template_kwargs(fields))
        settings = {name: value for name, value in fields.items() if value is not None}
        stream = take(settings, "stream", bool, "true or false") or False
        options = take(settings, "stream_options", dict, "an object") or {}
        return cls(
            ChatRequest(messages, head, stream, settings, size),
            include_usage=options.get("include_usage") is True,
            include_logprobs=settings.get("logprobs") is True,
        )

    def reply(self, answer: Answer) -> bytes:
        return answer.written

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The role, the whole message as one delta, the finish reason, the usage, and `[DONE]`."""
        completion = answer.completion
        choice = completion["choices"][0]
        message = choice["message"]
        delta = {k: value for k, value in message.items() if k != "role" and value not in (None, "", [])}
        if "tool_calls" in delta:
            calls = delta["tool_calls"]
            delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
        yield _event(completion, [_choice({"role": message.get("role", "assistant"), "content": ""})])
        logprobs = choice.get("logprobs") if self.include_logprobs else None
        if delta or logprobs:
            more = {"logprobs": logprobs} if logprobs else {}
            yield _event(completion, [{**_choice(delta), **more}])
        yield _event(completion, [_choice({}, choice["finish_reason"])])
        if self.include_usage:
            yield _event(completion, [], usage=completion.get("usage"))
        yield b"data: [DONE]\n\n"


def _template_kwargs(fields: Json) -> Json:
    """`chat_template_kwargs`, and what stands beside it for the engine and is the template's business too.

    An engine reads `reasoning_effort` "none" as thinking switched off, under either name that templates have
    for it (SGLang's request class); a prompt that says otherwise would not fit the engine's parser.
    """
    given = take(fields, "chat_template_kwargs", dict, "an object") or {}
    beside = {name: fields[name] for name in _FOR_TEMPLATE if fields.get(name) is not None}
    if beside.get("reasoning_effort") == "none":
        beside = {"thinking": False, "enable_thinking": False, **beside}
    return {**beside, **{name: value for name, value in given.items() if value is not None}}


def _choice(delta: Mapping[str, Any], finish_reason: str | None = None) -> Json:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _event(completion: Mapping[str, Any], choices: list[Json], **more: Any) -> bytes:
    head = {key: completion.get(key) for key in ("id", "created", "model")}
    event = {**head, "object": "chat.completion.chunk", "choices": choices, **more}
    return b"data: " + orjson.dumps(event) + b"\n\n"


_MESSAGE: Final[Json] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"type": ["string", "array", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
    },
}
_REQUEST: Final[Json] = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "tools": {"type": ["array", "null"]},
        "chat_template_kwargs": {"type": ["object", "null"]},
        "n": {"enum": [1, None]},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {
            "type": ["object", "null"],
            "properties": {"include_usage": {"description": "true: the token counts come at the end."}},
        },
    },
}

DIALECT: Final = Dialect(
    name="chat",
    path="v1/chat/completions",
    parse=ChatCompletion.parse,
    request_schema=_REQUEST,
    reply_schema={"type": "object", "properties": {"choices": {"type": "array"}}, "required": ["choices"]},
)
