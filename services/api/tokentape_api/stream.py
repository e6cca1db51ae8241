"""A finished answer as server-sent events, for clients that asked for `stream: true`.

The shape is that of OpenAI's chat completion chunks. The turn is recorded before the first event goes out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson


def chunks(answer: Mapping[str, Any], *, include_usage: bool, include_logprobs: bool) -> Iterator[bytes]:
    """The events: the role, the whole message as one delta, the finish reason, the usage, and `[DONE]`.

    With `include_logprobs` the message comes with the log-probs of its tokens, as the engine gave them.
    """
    choice = answer["choices"][0]
    message = choice["message"]
    delta = {key: value for key, value in message.items() if key != "role" and value not in (None, "", [])}
    if "tool_calls" in delta:
        calls = delta["tool_calls"]
        delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
    yield _event(answer, [_choice({"role": message.get("role", "assistant"), "content": ""})])
    logprobs = choice.get("logprobs") if include_logprobs else None
    if delta or logprobs:
        more = {"logprobs": logprobs} if logprobs else {}
        yield _event(answer, [{**_choice(delta), **more}])
    yield _event(answer, [_choice({}, choice["finish_reason"])])
    if include_usage:
        yield _event(answer, [], usage=answer.get("usage"))
    yield b"data: [DONE]\n\n"


def _choice(delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _event(answer: Mapping[str, Any], choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = {key: answer.get(key) for key in ("id", "created", "model")}
    event = {**head, "object": "chat.completion.chunk", "choices": choices, **more}
    return b"data: " + orjson.dumps(event) + b"\n\n"
