"""What the clients read in a reply."""

from typing import Any

import httpx
import orjson

from tests.faults.engine import DIGEST
from tests.faults.history import Kind
from tokentape_contracts.http import CONTRACT_HEADER, DIGEST_HEADER


def read(kind: Kind, reply: httpx.Response) -> dict[str, Any]:
    """What a reply says, as fields of `Call`."""
    if not reply.is_success:
        body = _json(reply).get("error")
        error = body if isinstance(body, dict) else {}
        return {
            "code": error.get("code", ""),
            "detail": error.get("message", ""),
            "retry": reply.headers.get("x-should-retry", ""),
            "retry_after": reply.headers.get("Retry-After", ""),
        }
    match kind:
        case "open":
            return {"session": _json(reply)["session_id"]}
        case "chat" if reply.headers["content-type"].startswith("text/event-stream"):
            return _read_stream(reply.text)
        case "chat":
            answer = _json(reply)
            meta = answer["choices"][0]["meta_info"]
            return {
                "response_id": answer["id"],
                "text": answer["choices"][0]["message"]["content"],
                "output": tuple((token, logprob) for logprob, token, _ in meta["output_token_logprobs"]),
                "prompt_digest": meta[DIGEST],
            }
        case "collect":
            digest = reply.headers[DIGEST_HEADER].removeprefix("sha-256=")
            return {
                "payload": reply.content,
                "digest": digest,
                "contract": int(reply.headers[CONTRACT_HEADER]),
            }
    return {}


def _read_stream(text: str) -> dict[str, Any]:
    """What server-sent events say; without their last one the client has no answer."""
    *events, end = [line.removeprefix("data: ") for line in text.splitlines() if line] or [""]
    if end != "[DONE]":
        return {"status": None, "error": f"the stream ends after {len(events)} events"}
    answers = [orjson.loads(event) for event in events]
    deltas = [choice["delta"] for answer in answers for choice in answer["choices"]]
    return {
        "response_id": answers[0]["id"],
        "text": "".join(delta.get("content", "") for delta in deltas),
    }


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        content = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return {}
    return content if isinstance(content, dict) else {}
