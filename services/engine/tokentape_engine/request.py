"""Request bodies, checked: from SGLang's JSON to the ids to continue and how to sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tokentape_engine.model import TinyModel
from tokentape_engine.sampling import Sampling
from tokentape_engine.weights import WeightUpdate

Body = dict[str, Any]

DEFAULT_GENERATE_TOKENS = 128
"""`max_new_tokens` of `/generate` when the request does not say; a chat may fill the context."""

# What this server does not do, with the values that ask for nothing. Anything else is refused: to ignore it
# would be a wrong answer. Fields that are not listed anywhere are ignored, as SGLang does.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "json_schema": (),
    "logit_bias": ({},),
    "lora_path": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_indexer_topk": (False,),
    "stop_regex": (),
    "stream": (False,),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}


class BadRequestError(ValueError):
    """The caller must change the request; the text says what."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request: continue `prompt`, and what to put in the reply."""

    prompt: list[int]
    sampling: Sampling
    tools: bool = False
    logprobs: bool = False
    meta_info: bool = False
    token_ids: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    experts_from: int | None = None
    """Index of the first token whose experts are wanted; None: of no token."""


def read_json(raw: bytes) -> Body:
    """The body as a JSON object."""
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def read_chat(body: Body, model: TinyModel) -> GenerationRequest:
    """`/v1/chat/completions`: `input_ids` are taken as they are; without them the messages are rendered."""
    _refuse_unsupported(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequestError("messages must be a list of objects")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    if "input_ids" in body and body["input_ids"] is not None:
        prompt = body["input_ids"]
    else:
        prompt = _render(messages, tools, body.get("chat_template_kwargs"), model)
    prompt = _check_prompt(prompt, model)
    limit = _first(body, "max_completion_tokens", "max_tokens")
    experts_from = _read_experts_from(body, prompt, model)
    if experts_from is not None and not _flag(body, "return_meta_info"):
        raise BadRequestError("return_routed_experts needs return_meta_info: that is where the experts go")
    return GenerationRequest(
        prompt=prompt,
        sampling=_read_sampling(body, limit, len(prompt), model, default=None),
        tools=bool(tools),
        logprobs=_flag(body, "logprobs"),
        meta_info=_flag(body, "return_meta_info"),
        token_ids=_flag(body, "return_token_ids"),
        no_stop_trim=_flag(body, "no_stop_trim"),
        skip_special_tokens=_flag(body, "skip_special_tokens", default=True),
        experts_from=experts_from,
    )


def read_generate(body: Body, model: TinyModel) -> GenerationRequest:
    """`/generate`: `input_ids` and `sampling_params`."""
    parameters = body.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise BadRequestError("sampling_params must be an object")
    _refuse_unsupported(body)
    _refuse_unsupported(parameters)
    prompt = _check_prompt(body.get("input_ids"), model)
    limit = parameters.get("max_new_tokens")
    return GenerationRequest(
        prompt=prompt,
        sampling=_read_sampling(parameters, limit, len(prompt), model, default=DEFAULT_GENERATE_TOKENS),
        logprobs=_flag(body, "return_logprob"),
        meta_info=True,
        no_stop_trim=_flag(parameters, "no_stop_trim"),
        skip_special_tokens=_flag(parameters, "skip_special_tokens", default=True),
        experts_from=_read_experts_from(body, prompt, model),
    )


def read_update(body: Body) -> WeightUpdate:
    """`/update_weights`: every field has a default, and a field that it does not have is refused."""
    unknown = body.keys() - {"weight_version", "seed", "scale", "abort_all_requests"}
    if unknown:
        raise BadRequestError(f"no such field: {', '.join(sorted(unknown))}")
    version = body.get("weight_version")
    if version is not None and (not isinstance(version, str) or not version):
        raise BadRequestError(f"weight_version must be a non-empty string, got {version!r}")
    seed = _seed(body.get("seed"))
    default = WeightUpdate()
    try:
        return WeightUpdate(
            version=version,
            seed=default.seed if seed is None else seed,
            scale=_number(body, "scale", default.scale),
            abort_all=_flag(body, "abort_all_requests"),
        )
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def _refuse_unsupported(body: Body) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequestError(f"{name}={value!r} is not supported by the reference engine")


def _render(messages: list[Body], tools: Any, kwargs: Any, model: TinyModel) -> list[int]:
    if not messages:
        raise BadRequestError("messages must not be empty")
    if tools is not None and not isinstance(tools, list):
        raise BadRequestError("tools must be a list")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise BadRequestError("chat_template_kwargs must be an object")
    try:
        return model.render([_flatten(message) for message in messages], tools or None, **(kwargs or {}))
    except Exception as error:
        # Templates raise whatever a message makes them trip over: the messages are the caller's.
        raise BadRequestError(f"the chat template refused the messages: {error}") from error


def _flatten(message: Body) -> Body:
    """Content given as text parts becomes one string, which is all that the template reads."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise BadRequestError("content parts must be of type text")
    return message | {"content": "".join(part["text"] for part in content)}


def _check_prompt(prompt: Any, model: TinyModel) -> list[int]:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BadRequestError("input_ids must be a list of integers")
    if not prompt:
        raise BadRequestError("input_ids must not be empty")
    bound = model.vocab_size
    outside = next((token for token in prompt if not 0 <= token < bound), None)
    if outside is not None:
        raise BadRequestError(f"input_ids holds {outside}, but the vocabulary is 0 to {bound - 1}")
    if len(prompt) >= model.context_length:
        raise BadRequestError(
            f"{len(prompt)} prompt tokens leave no room in the context of {model.context_length} tokens"
        )
    return prompt


def _read_sampling(body: Body, limit: Any, used: int, model: TinyModel, default: int | None) -> Sampling:
    room = model.context_length - used
    if limit is None:
        limit = room if default is None else min(default, room)
    if type(limit) is not int:
        raise BadRequestError(f"the token limit must be an integer, got {limit!r}")
    if limit > room:
        raise BadRequestError(
            f"{used} prompt tokens and {limit} new tokens exceed the context of {model.context_length} tokens"
        )
    stop = body.get("stop") or ()
    try:
        return Sampling(
            max_tokens=limit,
            temperature=_number(body, "temperature", 1.0),
            top_p=_number(body, "top_p", 1.0),
            top_k=int(_number(body, "top_k", -1)),
            seed=_seed(_first(body, "seed", "sampling_seed")),
            stop=(stop,) if isinstance(stop, str) else tuple(_list_of(str, stop, "stop")),
            stop_token_ids=frozenset(_list_of(int, body.get("stop_token_ids") or (), "stop_token_ids")),
            ignore_eos=_flag(body, "ignore_eos"),
        )
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def _read_experts_from(body: Body, prompt: list[int], model: TinyModel) -> int | None:
    start = body.get("routed_experts_start_len")
    start = 0 if start is None else start
    if type(start) is not int or not 0 <= start <= len(prompt):
        raise BadRequestError(
            f"routed_experts_start_len must be an integer from 0 to the {len(prompt)} prompt tokens, "
            f"got {start!r}"
        )
    if not _flag(body, "return_routed_experts"):
        return None
    if model.kind == "dense":
        raise BadRequestError(
            "return_routed_experts=True is not supported: this model is dense, without experts"
        )
    return start


def _seed(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise BadRequestError(f"seed must be an integer from 0 to 2^63 - 1, got {value!r}")
    return value


def _first(body: Body, *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def _number(body: Body, name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequestError(f"{name} must be a number, got {value!r}")
    return value


def _flag(body: Body, name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, got {value!r}")
    return value


def _list_of(kind: type[Any], value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
        raise BadRequestError(f"{name} must be a list of {kind.__name__}")
    return list(value)
