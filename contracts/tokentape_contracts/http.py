"""Request bodies and headers of the HTTP API.

The parsers take raw bytes and raise `InvalidRequest` with the field and what is wrong with it. They refuse
unknown fields: a misspelt `max_seq_len` must not silently train on whole episodes.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from tokentape_contracts import limits
from tokentape_contracts.errors import ContractUnsupported, InvalidRequest

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
"""Request header to the engine: the session id, by which a router keeps prefix-cache affinity (SGLang)."""
RETRY_HEADER: Final = "x-should-retry"
"""Reply header of every error: `true` or `false`; OpenAI's SDKs obey it."""
ACCEPT_CONTRACT_HEADER: Final = "Accept-Contract"
"""Request header: the versions of the samples format that the client reads, e.g. `1,2`."""
CONTRACT_HEADER: Final = "Tokentape-Contract"
"""Reply header: the version that the server wrote."""
DIGEST_HEADER: Final = "Tokentape-Digest"
"""Reply header: `sha-256=<hex>` of the body."""

SCOPES: Final = ("agent", "driver", "admin")
"""What a bearer token may be used for. `agent`: to chat in a session. `driver`: to open, collect, show and
delete sessions. `admin`: everything, in the sessions of all tenants."""
TOKEN_PREFIX: Final = "tt_"  # noqa: S105 - how tokens begin
"""How a token begins, by which scanners of code and logs find one that leaked."""

ALTERED_ANSWER: Final = ("refuse", "keep")
"""What a linear session does with a recorded answer that comes back altered: it refuses the request, or goes
on from the recorded answer."""
MODES: Final = ("linear", "tree")
"""`linear`: one path, one sample. `tree`: everything that was sampled is kept, one sample per kept leaf."""
PRESENT_ROLES: Final[Mapping[str, str]] = {"developer": "system", "function": "tool"}
"""OpenAI's other names of a role → the one that all servers and chat templates know."""
PIN_FIELDS: Final = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "lora_path",
        "max_completion_tokens",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Request fields of the engine that `POST /sessions` may pin: they win over what the agent sends."""
_LENGTHS: Final = frozenset({"max_tokens", "max_completion_tokens"})
"""Two names of one parameter: pinning one of them must not leave the agent the other."""


_BLOCK: Final = 64 * 1024
"""Bytes of a body that are searched at once."""
_NO_MARKS: Final = bytes(set(range(256)) - set(b'",[{'))


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Body of `POST /sessions`. Every field may be absent, and so may the body.

    `mode`, `matcher` and `altered_answer` override the server's defaults. `labels` is any JSON object, kept
    with the session. `pins` are sampling parameters (`PIN_FIELDS`). For drivers of the Miles session server,
    a pin may also stand at the top level and `evaluation` becomes a label.
    """

    mode: str | None = None
    matcher: str | None = None
    altered_answer: str | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: bytes, *, matchers: tuple[str, ...]) -> "OpenRequest":
        """Reads a body; an empty one opens a session with the server's defaults."""
        fields = parse_object(body) if body.strip() else {}
        labels = dict(_take(fields, "labels", _is_object, "an object") or {})
        pins = dict(_take(fields, "pins", _is_object, "an object") or {})
        if (evaluation := _take(fields, "evaluation", _is_bool, "true or false")) is not None:
            labels["evaluation"] = evaluation
        mode = _take(fields, "mode", MODES.__contains__, f"one of {', '.join(MODES)}")
        matcher = _take(fields, "matcher", matchers.__contains__, f"one of {', '.join(matchers)}")
        altered_answer = _take(
            fields, "altered_answer", ALTERED_ANSWER.__contains__, f"one of {', '.join(ALTERED_ANSWER)}"
        )
        pins.update({name: fields.pop(name) for name in PIN_FIELDS & fields.keys()})
        _refuse_rest(fields)
        if refusal := pins_refusal(pins):
            raise InvalidRequest(refusal)
        pins = {name: value for name, value in pins.items() if value is not None}
        return cls(mode, matcher, altered_answer, labels, pins)


def pins_refusal(pins: Mapping[str, Any]) -> str | None:
    """Why these cannot be pinned; None if they can."""
    if unknown := sorted(pins.keys() - PIN_FIELDS):
        return f"pins: {unknown[0]!r} cannot be pinned; known: {', '.join(sorted(PIN_FIELDS))}"
    return None


def pinned(fields: Mapping[str, Any], pins: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the pinned ones in place of theirs, under either name of a length."""
    hidden = _LENGTHS if _LENGTHS & pins.keys() else frozenset[str]()
    return {**{name: value for name, value in fields.items() if name not in hidden}, **pins}


@dataclass(frozen=True, slots=True)
class SamplesRequest:
    """Body of `POST /sessions/{sid}/samples`. Every field may be absent or null, and so may the body.

    `max_seq_len`: longest sample in tokens, prompt included, at least 1. `metadata`: the agent's own JSON
    object. `deadline_s`: seconds until the reply must have come, else 504.
    """

    max_seq_len: int | None = None
    metadata: Mapping[str, Any] | None = None
    deadline_s: float = limits.COLLECT_DEADLINE_S

    @classmethod
    def parse(cls, body: bytes) -> "SamplesRequest":
        fields = parse_object(body) if body.strip() else {}
        max_seq_len = _take(
            fields, "max_seq_len", lambda v: _is_int(v) and v >= 1, "an integer of at least 1"
        )
        metadata = _take(fields, "metadata", _is_object, "an object")
        longest = limits.COLLECT_DEADLINE_MAX_S
        deadline_s = _take(
            fields,
            "deadline_s",
            lambda v: (_is_int(v) or isinstance(v, float)) and 0 < v <= longest,
            f"a number of seconds above 0 and at most {longest:g}",
        )
        _refuse_rest(fields)
        return cls(
            max_seq_len, metadata, limits.COLLECT_DEADLINE_S if deadline_s is None else float(deadline_s)
        )

    def digest(self, tail: str, contract: int) -> str:
        """Names the outcome: equal for requests whose reply must be the same bytes. 32 hex digits."""
        what = orjson.dumps([tail, contract, self.max_seq_len, self.metadata], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(what).hexdigest()[:32]


def choose_contract(accept: str | None, supported: tuple[int, ...]) -> int:
    """The highest version that both sides know; 1 without the header.

    Raises:
        ContractUnsupported: the header names no version that this server writes, or is not a list of numbers.
    """
    if accept is None:
        return 1
    wanted = {part.strip() for part in accept.split(",")}
    common = [version for version in supported if str(version) in wanted]
    if not common:
        known = ", ".join(map(str, supported))
        raise ContractUnsupported(f"{ACCEPT_CONTRACT_HEADER} asks for {accept!r}; this server writes {known}")
    return max(common)


def parse_object(body: bytes) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InvalidRequest: the bytes are not JSON (with the position), not an object, hold too many values or
            nest them too deeply.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty; a JSON object is needed")
    # Nearly always the length says it, or so few marks that nobody need know which of them stand in strings.
    most = limits.JSON_VALUES
    if len(body) > most and marks_in(body) > most and values_in(body) > most:
        raise InvalidRequest(f"the body holds more than {limits.JSON_VALUES} values")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_json_type(value)}")
    if body.count(b"{") + body.count(b"[") > limits.JSON_DEPTH and _deeper_than(value, limits.JSON_DEPTH):
        raise InvalidRequest(f"the body nests deeper than {limits.JSON_DEPTH} levels")
    return value


def marks_in(body: bytes) -> int:
    """Commas and opening brackets in a JSON text, also in its strings: it holds at most one value more."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def values_in(body: bytes) -> int:
    """How many values a JSON text holds, about: its commas and opening brackets outside of strings.

    Looks at the bytes alone, in blocks: takes no memory, and lets other threads run. For a text that is not
    JSON the number has no meaning.
    """
    count, is_inside, start = 0, False, 0
    while start < len(body):
        block = body[start : start + _BLOCK]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:  # it ends within an escape
            block = body[start : start + _BLOCK + 1]
        start += len(block)
        if b"\\" in block:
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = block.translate(None, _NO_MARKS).split(b'"')
        count += sum(map(len, parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0
    return count


def _deeper_than(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        inner = (child for v in level for child in (v.values() if isinstance(v, dict) else v))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _take(fields: dict[str, Any], name: str, accepts: Callable[[Any], bool], expected: str) -> Any:
    value = fields.pop(name, None)
    try:
        if value is None or accepts(value):
            return value
    except TypeError:
        pass
    raise InvalidRequest(f"{name} must be {expected}, not {_json_type(value)} {str(value)[:80]!r}")


def _refuse_rest(fields: Mapping[str, Any]) -> None:
    if fields:
        raise InvalidRequest(f"unknown field {min(fields)!r}")


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]
