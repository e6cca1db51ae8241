"""Reply bodies in SGLang's shapes."""

from __future__ import annotations

import base64
import itertools
import time
import uuid
from typing import Any

from transformers import PreTrainedTokenizerFast

from tokentape_engine.parse import parse_message
from tokentape_engine.request import GenerationRequest
from tokentape_engine.sequence import Completion, Finish
from tokentape_engine.weights import Updated


def chat_reply(
    request: GenerationRequest, done: Completion, tokenizer: PreTrainedTokenizerFast, model_name: str
) -> dict[str, Any]:
    """The answer to `/v1/chat/completions`."""
    reply_id = uuid.uuid4().hex
    message = parse_message(_text(request, done, tokenizer), tools=request.tools)
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": _openai_logprobs(done, tokenizer) if request.logprobs else None,
        # As in SGLang: a call that was cut off by the limit is not a finished call.
        "finish_reason": "tool_calls" if message["tool_calls"] and done.finish == "stop" else done.finish,
        "matched_stop": done.matched_stop,
    }
    if request.meta_info:
        choice["meta_info"] = _meta_info(reply_id, request, done)
    if request.token_ids:
        choice["prompt_token_ids"] = request.prompt
        choice["response_token_ids"] = done.tokens
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(done.tokens),
            "total_tokens": len(request.prompt) + len(done.tokens),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        },
    }


def generate_reply(
    request: GenerationRequest, done: Completion, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """The answer to `/generate`."""
    details: dict[Finish, dict[str, Any]] = {
        "stop": {"matched": done.matched_stop},
        "length": {"length": len(done.tokens)},
        "abort": {"message": "aborted by a weight update"},
    }
    finish_reason = {"type": done.finish} | details[done.finish]
    return {
        "text": _text(request, done, tokenizer),
        "output_ids": done.tokens,
        "meta_info": _meta_info(uuid.uuid4().hex, request, done) | {"finish_reason": finish_reason},
    }


def update_reply(updated: Updated) -> dict[str, Any]:
    """The answer to `/update_weights`."""
    return {"success": True, "weight_version": updated.version, "aborted": updated.aborted}


def error_reply(status: int, kind: str, message: str) -> dict[str, Any]:
    """The body of every answer that is not 200."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _text(request: GenerationRequest, done: Completion, tokenizer: PreTrainedTokenizerFast) -> str:
    tokens = done.tokens
    if isinstance(done.matched_stop, int) and not request.no_stop_trim:
        tokens = tokens[:-1]
    text = str(tokenizer.decode(tokens, skip_special_tokens=request.skip_special_tokens))
    if isinstance(done.matched_stop, str) and not request.no_stop_trim:
        text = text.partition(done.matched_stop)[0]
    return text


def _meta_info(reply_id: str, request: GenerationRequest, done: Completion) -> dict[str, Any]:
    info: dict[str, Any] = {
        "id": reply_id,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(done.tokens),
        "cached_tokens": done.cached_tokens,
        "weight_version": done.weight_version,
        "weight_versions": _spans(done.token_versions),
        "e2e_latency": done.latency_s,
    }
    if done.experts is not None:
        info["routed_experts"] = base64.b64encode(done.experts.numpy().astype("<i4").tobytes()).decode()
    if request.logprobs:
        pairs = zip(done.logprobs, done.tokens, strict=True)
        info["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return info


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    """Runs of equal versions, as output tokens [start, end)."""
    spans: list[dict[str, Any]] = []
    end = 0
    for version, run in itertools.groupby(versions):
        start, end = end, end + len(list(run))
        spans.append({"version": version, "start": start, "end": end})
    return spans


def _openai_logprobs(done: Completion, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    content = []
    for token, logprob in zip(done.tokens, done.logprobs, strict=True):
        text = str(tokenizer.decode([token]))
        entry = {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        content.append(entry)
    return {"content": content}
