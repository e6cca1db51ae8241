"""JSON schemas of the bodies that the API reads and writes, for its OpenAPI document."""

from typing import Any, Final

from tokentape_contracts import limits
from tokentape_contracts.errors import TABLE, Actor
from tokentape_contracts.http import (
    ALTERED_ANSWER,
    CONTRACT_HEADER,
    DIGEST_HEADER,
    MODES,
    PIN_FIELDS,
)
from tokentape_contracts.samples import SUPPORTED_CONTRACTS
from tokentape_core.domain.match import MATCHERS

Json = dict[str, Any]


def closed(properties: Json, required: list[str]) -> Json:
    """An object with these keys and no others."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def reply(description: str, schema: Json, media_type: str = "application/json") -> Json:
    """What OpenAPI says of one reply."""
    return {"description": description, "content": {media_type: {"schema": schema}}}


def ready(is_ready: bool) -> Json:
    """Of `GET /ready`."""
    properties = {"ready": {"const": is_ready}, "checks": {"type": "object"}}
    return {"type": "object", "properties": properties, "required": list(properties)}


HEALTH: Final[Json] = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
OPENED: Final[Json] = {
    "type": "object",
    "properties": {"session_id": {"type": "string"}},
    "required": ["session_id"],
}
PINS: Final[Json] = {
    **closed({name: {"description": "The engine's; null is no pin."} for name in sorted(PIN_FIELDS)}, []),
    "description": "Sampling parameters that win over the agent's.",
}
OPEN_REQUEST: Final[Json] = closed(
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
)
SAMPLES_REQUEST: Final[Json] = closed(
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
)
_OBJECTS: Final[Json] = {"type": "array", "items": {"type": "object"}}
SHOWN: Final[Json] = {
    "oneOf": [
        closed(
            {"session_id": {"type": "string"}, "records": _OBJECTS, "metadata": {"type": "object"}},
            ["session_id", "records", "metadata"],
        ),
        closed({"session_id": {"type": "string"}, "events": _OBJECTS}, ["session_id", "events"]),
    ]
}
SAMPLES_HEADERS: Final[Json] = {
    CONTRACT_HEADER: {
        "required": True,
        "schema": {"enum": [str(version) for version in SUPPORTED_CONTRACTS]},
    },
    DIGEST_HEADER: {"required": True, "schema": {"type": "string", "pattern": "^sha-256=[0-9a-f]{64}$"}},
    "Server-Timing": {"required": True, "schema": {"type": "string"}},
}
_ERROR: Final[Json] = {
    "message": {"type": "string"},
    "type": {"enum": [error.__name__ for error in TABLE]},
    "param": {"type": "null"},
    "code": {"enum": [error.code for error in TABLE]},
    "retryable": {"type": "boolean"},
    "actor": {"enum": [actor.value for actor in Actor]},
}
ERROR: Final[Json] = closed({"error": closed(_ERROR, list(_ERROR))}, ["error"])
