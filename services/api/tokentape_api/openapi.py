"""The OpenAPI document of the HTTP API, made from the same tables as the API: errors, pins, limits, scopes.

`scripts/generate-docs` writes it to docs/reference/openapi.json. The catch-all is not in it: OpenAPI has no
path of any length.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokentape_api.http.access import ACCESS
from tokentape_contracts import limits
from tokentape_contracts.errors import TABLE, Actor, TokentapeError
from tokentape_contracts.http import (
    ACCEPT_CONTRACT_HEADER,
    ALTERED_ANSWER,
    CONTRACT_HEADER,
    DIGEST_HEADER,
    MODES,
    PIN_FIELDS,
    RETRY_HEADER,
)
from tokentape_contracts.samples import SUPPORTED_CONTRACTS
from tokentape_core.domain.match import MATCHERS

Json = dict[str, Any]

_ACCESS_CODES: Final = ("unauthenticated", "forbidden")
_SESSION_CODES: Final = ("session_not_found", "session_deleted", "store_unavailable")
_STREAM_CODES: Final = ("event_unsupported", "stream_corrupt", "internal_error")
CODES: Final[Mapping[str, tuple[str, ...]]] = {
    "GET /health": (),
    "GET /ready": (),
    "GET /metrics": (),
    "POST /sessions": (
        *(*_ACCESS_CODES, "invalid_request", "request_too_large", "too_many_sessions", "store_unavailable"),
        *("overloaded", "internal_error"),
    ),
    "GET /sessions/{sid}": (
        *(*_ACCESS_CODES, *_SESSION_CODES, *_STREAM_CODES, "invalid_request", "overloaded"),
    ),
    "DELETE /sessions/{sid}": (*_ACCESS_CODES, "session_not_found", "store_unavailable", *_STREAM_CODES),
    "POST /sessions/{sid}/v1/chat/completions": (
        *(*_ACCESS_CODES, *_SESSION_CODES, *_STREAM_CODES),
        *("invalid_request", "cannot_extend", "answer_altered", "head_changed", "session_full"),
        *("turn_truncated", "request_too_large", "prompt_too_long", "overloaded"),
        *("matcher_failed", "template_mismatch", "engine_reply_invalid", "engine_unavailable"),
        *("generation_aborted", "engine_timeout"),
    ),
    "POST /sessions/{sid}/samples": (
        *(*_ACCESS_CODES, *_SESSION_CODES, *_STREAM_CODES),
        *("invalid_request", "contract_unsupported", "request_too_large", "hook_failed", "prefix_broken"),
        *("replay_broken", "assembly_failed", "queue_full", "overloaded", "deadline_exceeded"),
    ),
}
"""Operation → the codes of the errors that it may answer with."""


def document(version: str) -> Json:
    """The OpenAPI 3.1 document.

    Args:
        version: of Tokentape.
    """
    paths: dict[str, Json] = {}
    for name, operation in _operations().items():
        method, path = name.split()
        scope = ACCESS[path]
        paths.setdefault(path, {})[method.lower()] = {
            **operation,
            "security": [{}, {"token": [scope]}] if scope else [],
            "responses": {**operation["responses"], **_errors(CODES[name])},
        }
        if "{sid}" in path:
            paths[path]["parameters"] = [{"$ref": "#/components/parameters/sid"}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokentape",
            "version": version,
            "description": "Records LLM agents in RL rollouts as exact token ids and assembles training "
            "samples on the server. Beside these paths, any other below a session is forwarded to the "
            "engine, unrecorded: see http.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "parameters": {
                "sid": {
                    "name": "sid",
                    "in": "path",
                    "required": True,
                    "description": "A session's id.",
                    "schema": {"type": "string", "minLength": 1, "maxLength": limits.SESSION_ID_CHARS},
                }
            },
            "schemas": {"Error": _error_schema(), "Message": _MESSAGE, "Pins": _pins()},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed if the server was started with --tokens-file. The scope that an "
                    "operation needs stands in its `security`; `admin` allows all of them.",
                }
            },
        },
    }


def _operations() -> dict[str, Json]:
    return {
        "GET /health": {
            "operationId": "health",
            "summary": "The process lives",
            "responses": {
                "200": _json("The event loop turns.", _object({"status": {"const": "ok"}}, ["status"]))
            },
        },
        "GET /ready": {
            "operationId": "ready",
            "summary": "Redis answers, and the engine has sent what the recording needs",
            "responses": {
                "200": _json("Requests may be sent here.", _ready(True)),
                "503": _json("Something is missing.", _ready(False)),
            },
        },
        "GET /metrics": {
            "operationId": "metrics",
            "summary": "Metrics of this process, in Prometheus's text format",
            "responses": {"200": _content("All metrics.", "text/plain", {"type": "string"})},
        },
        "POST /sessions": {
            "operationId": "openSession",
            "summary": "Opens a session",
            "requestBody": _body(_open_request(), required=False),
            "responses": {
                "200": _json(
                    "The session is open.", _object({"session_id": {"type": "string"}}, ["session_id"])
                )
            },
        },
        "GET /sessions/{sid}": {
            "operationId": "showSession",
            "summary": "Shows what was recorded",
            "parameters": [
                {
                    "name": "view",
                    "in": "query",
                    "description": "`events`: the events themselves, in place of the turns as requests and "
                    "responses.",
                    "schema": {"type": "string"},
                }
            ],
            "responses": {"200": _json("What was recorded.", _shown())},
        },
        "DELETE /sessions/{sid}": {
            "operationId": "deleteSession",
            "summary": "Ends a session; may be repeated",
            "responses": {"204": {"description": "It is ended."}},
        },
        "POST /sessions/{sid}/v1/chat/completions": {
            "operationId": "chat",
            "summary": "Generates and records one turn",
            "requestBody": _body(_chat_request(), required=True),
            "responses": {
                "200": {
                    "description": "The engine's answer, once the turn is recorded. What an engine refuses "
                    "is passed on with its own status and body.",
                    "content": {
                        "application/json": {"schema": _object({"choices": {"type": "array"}}, ["choices"])},
                        "text/event-stream": {"schema": {"type": "string"}},
                    },
                }
            },
        },
        "POST /sessions/{sid}/samples": {
            "operationId": "collectSamples",
            "summary": "Assembles the training samples",
            "parameters": [
                {
                    "name": ACCEPT_CONTRACT_HEADER,
                    "in": "header",
                    "description": "The versions of the samples format that the client reads: numbers, with "
                    "commas between them. 1 without it.",
                    "schema": {"type": "string"},
                }
            ],
            "requestBody": _body(_samples_request(), required=False),
            "responses": {"200": _samples()},
        },
    }


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


def _object(properties: Json, required: list[str], *, closed: bool = False) -> Json:
    schema: Json = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False} if closed else schema


def _content(description: str, media_type: str, schema: Json) -> Json:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _json(description: str, schema: Json) -> Json:
    return _content(description, "application/json", schema)


def _body(schema: Json, *, required: bool) -> Json:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def _ready(is_ready: bool) -> Json:
    return _object({"ready": {"const": is_ready}, "checks": {"type": "object"}}, ["ready", "checks"])


def _pins() -> Json:
    properties = {name: {"description": "The engine's; null is no pin."} for name in sorted(PIN_FIELDS)}
    return {
        **_object(properties, [], closed=True),
        "description": "Sampling parameters that win over the agent's.",
    }


def _open_request() -> Json:
    return _object(
        {
            "mode": {"enum": [*MODES, None]},
            "matcher": {
                "type": ["string", "null"],
                "description": f"{', '.join(MATCHERS)}, or the server's own.",
            },
            "altered_answer": {
                "enum": [*ALTERED_ANSWER, None],
                "description": "What a linear session does with a recorded answer that comes back altered.",
            },
            "labels": {"type": ["object", "null"]},
            "pins": {"oneOf": [{"$ref": "#/components/schemas/Pins"}, {"type": "null"}]},
            "evaluation": {"type": ["boolean", "null"], "description": "Becomes a label."},
            **{name: {"description": "The same as in `pins`."} for name in sorted(PIN_FIELDS)},
        },
        [],
        closed=True,
    )


def _chat_request() -> Json:
    return _object(
        {
            "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}},
            "tools": {"type": ["array", "null"]},
            "chat_template_kwargs": {"type": ["object", "null"]},
            "n": {"enum": [1, None]},
            "stream": {"type": ["boolean", "null"]},
            "stream_options": {
                "type": ["object", "null"],
                "properties": {"include_usage": {"description": "true: the token counts come at the end."}},
            },
        },
        ["messages"],
    )


def _samples_request() -> Json:
    return _object(
        {
            "max_seq_len": {"type": ["integer", "null"], "minimum": 1, "maximum": 2**63 - 1},
            "metadata": {"type": ["object", "null"]},
            "deadline_s": {
                "type": ["number", "null"],
                "exclusiveMinimum": 0,
                "maximum": limits.COLLECT_DEADLINE_MAX_S,
                "default": limits.COLLECT_DEADLINE_S,
            },
        },
        [],
        closed=True,
    )


def _shown() -> Json:
    session_id = {"type": "string"}
    objects = {"type": "array", "items": {"type": "object"}}
    return {
        "oneOf": [
            _object(
                {"session_id": session_id, "records": objects, "metadata": {"type": "object"}},
                ["session_id", "records", "metadata"],
                closed=True,
            ),
            _object({"session_id": session_id, "events": objects}, ["session_id", "events"], closed=True),
        ]
    }


def _samples() -> Json:
    reply = _content(
        "One safetensors container: see samples.md.",
        "application/octet-stream",
        {"type": "string", "contentMediaType": "application/octet-stream"},
    )
    headers: dict[str, Json] = {
        CONTRACT_HEADER: {"schema": {"enum": [str(version) for version in SUPPORTED_CONTRACTS]}},
        DIGEST_HEADER: {"schema": {"type": "string", "pattern": "^sha-256=[0-9a-f]{64}$"}},
        "Server-Timing": {"schema": {"type": "string"}},
    }
    return {**reply, "headers": {name: {"required": True, **header} for name, header in headers.items()}}


def _errors(codes: Iterable[str]) -> Json:
    """Status → the errors of that status."""
    rules = {error.code: rule for error, rule in TABLE.items()}
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(rules[code].status, []).append(code)
    return {
        str(status): {
            "description": ", ".join(f"`{code}`" for code in of_status),
            "headers": {RETRY_HEADER: {"required": True, "schema": {"enum": ["true", "false"]}}},
            "content": {
                "application/json": {
                    "schema": {
                        "allOf": [
                            {"$ref": "#/components/schemas/Error"},
                            {
                                "properties": {
                                    "error": {
                                        "properties": {"code": {"enum": of_status}},
                                        "required": ["code"],
                                    }
                                }
                            },
                        ]
                    }
                }
            },
        }
        for status, of_status in sorted(by_status.items())
    }


def _error_schema() -> Json:
    errors: list[type[TokentapeError]] = list(TABLE)
    inner = {
        "message": {"type": "string"},
        "type": {"enum": [error.__name__ for error in errors]},
        "param": {"type": "null"},
        "code": {"enum": [error.code for error in errors]},
        "retryable": {"type": "boolean"},
        "actor": {"enum": [actor.value for actor in Actor]},
    }
    return _object({"error": _object(inner, list(inner), closed=True)}, ["error"], closed=True)
