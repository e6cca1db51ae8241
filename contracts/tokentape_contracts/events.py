"""Session events: what the stream of a session holds, and its bytes.

A session's stream is its truth. It begins with one `session.opened`, goes on with `turn.recorded` number
1, 2, 3 …, and ends, if it was deleted, with one `session.sealed`.

An event is a Redis stream entry of these fields:

    type   the dotted name, for ever the same
    v      the version of the payload, a decimal number
    id     a uuid (32 hex digits), minted by the writer: after an unclear outcome, whoever reads its own uuid
           at the id that it wrote knows that it succeeded
    json   every other field that is not binary, one JSON object
    …      binary fields, raw little-endian: `suffix` int32[S], `output` int32[O], `logprobs` float64[O]

Routing replay rows are too large for an entry that is read with every other: `turn.recorded` refers to them
(`Blob`), and they lie beside the stream, in the hash `keys.blobs`, written in the same transaction.

Versions: only the newest is written. A reader lifts older ones with pure functions `v → v + 1` before it
validates; an unknown type or a newer version is an error, never skipped (`EventUnsupported`), and so is a
damaged entry (`StreamCorrupt`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from tokentape_contracts.errors import EventUnsupported, StreamCorrupt

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]
Fields = dict[bytes, bytes]
"""A stream entry's fields as Redis gives them."""
Upcast = Callable[[Fields], Fields]

OPENED_ID: Final = "0-1"
SEALED_ID: Final = "18446744073709551615-18446744073709551615"
"""The greatest id there is: after an entry here Redis itself refuses every append."""

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "suffix": np.dtype("<i4"),
    "output": np.dtype("<i4"),
    "logprobs": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """How a session's engine is asked for one kind of routing replay rows.

    Attributes:
        rows: `full`, every turn brings the rows of its whole prompt again; `incremental`, only those that the
            turns before have not.
        layers: layers in the payload; None if the engine says it with the payload.
        prefix: of which turn a row is taken that several turns sent: `latest`, the last one's; `recorded`,
            that of the turn in which its token was first read.
    """

    rows: str
    layers: int | None
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One turn's routing replay rows of one kind: what the engine sent, and what is stored with this turn.

    The engine sent rows `start` to `start + rows - 1`, each of `layers` times `topk` numbers. Those that are
    not in `stored` equal the parent's rows at the same positions.

    Attributes:
        start: the first row's position in the path's tokens.
        rows: how many the engine sent.
        layers: layers per row.
        topk: numbers per layer.
        dtype: of the stored bytes: `u1`, `u2` or `i4`, little-endian.
        stored: `(first, count)` runs of positions, ascending; the bytes hold these rows in this order.
        parts: how many fields of `keys.blobs` hold the bytes.
    """

    start: int
    rows: int
    layers: int
    topk: int
    dtype: str
    stored: tuple[tuple[int, int], ...]
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A session began; everything that its replay depends on is fixed here.

    Attributes:
        id: uuid of the event.
        mode: `linear` or `tree`.
        matcher: how a request's messages are compared with recorded ones.
        altered_answer: what a linear session does with a recorded answer that comes back altered: `refuse`
            the request, or `keep` the recorded one.
        family: name of the model family whose boundary rules apply.
        max_trim_tokens: how many trailing tokens of a turn the next prompt may render anew.
        template: fingerprint of tokenizer and chat template.
        labels: the caller's own JSON object.
        pins: sampling parameters that win over the agent's.
        replay: kind of routing replay rows → how the engine is asked for them; empty if it is not.
        tenant: whose session it is; empty where the server asks for no credentials.
        opened_at: Unix seconds; the date that a chat template writes.
    """

    TYPE: ClassVar[str] = "session.opened"
    VERSION: ClassVar[int] = 3

    id: str
    mode: str
    matcher: str
    altered_answer: str
    family: str
    max_trim_tokens: int
    template: str
    labels: Mapping[str, Any]
    pins: Mapping[str, Any]
    replay: Mapping[str, ReplaySpec]
    tenant: str
    opened_at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRecorded:
    """The engine generated one turn: exactly what it received and what it produced.

    Attributes:
        id: uuid of the event.
        parent: seq of the turn that this one continues; 0 for the first of a conversation.
        keep: how many of the parent's tokens the prompt reused; 0 without a parent.
        suffix: int32[S], prompt tokens after the kept ones.
        output: int32[O], sampled tokens, the stop token included.
        logprobs: float64[O], log-probability of each, as the engine gave it.
        finish: the engine's finish reason.
        response_id: the engine's id of the answer.
        messages: the request's messages after the parent's, then the assistant's answer.
        tools: the request's tools; None means the parent turn's.
        altered: places in the conversation (from 0) of answers that the request had altered, and that were
            kept as recorded; without those that a turn before names.
        request: the rest of the request: sampling parameters, template arguments.
        reply: the rest of the engine's answer, without message and `meta_info`.
        meta: the engine's counters (`meta_info` without the tokens).
        replay: kind of routing replay rows → what the engine sent of it.
        requested_at: Unix seconds when the request came in; decoration, as order is seq.
        committed_at: Unix seconds when the turn was complete; decoration.
    """

    TYPE: ClassVar[str] = "turn.recorded"
    VERSION: ClassVar[int] = 3

    id: str
    parent: int
    keep: int
    suffix: Ids
    output: Ids
    logprobs: Floats
    finish: str
    response_id: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    altered: list[int]
    request: Mapping[str, Any]
    reply: Mapping[str, Any]
    meta: Mapping[str, Any]
    replay: Mapping[str, Blob]
    requested_at: float
    committed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSealed:
    """The session ended; nothing follows.

    Attributes:
        id: uuid of the event.
        reason: `deleted`.
        sealed_at: Unix seconds; decoration.
    """

    TYPE: ClassVar[str] = "session.sealed"
    VERSION: ClassVar[int] = 1

    id: str
    reason: str
    sealed_at: float


Event = SessionOpened | TurnRecorded | SessionSealed

TYPES: Final[Mapping[str, type[Event]]] = {e.TYPE: e for e in (SessionOpened, TurnRecorded, SessionSealed)}


def _with(**added: Any) -> Upcast:
    """Adds fields to the JSON."""
    return lambda entry: {**entry, b"json": orjson.dumps({**orjson.loads(entry[b"json"]), **added})}


UPCASTS: Final[Mapping[tuple[str, int], Upcast]] = {
    (SessionOpened.TYPE, 1): _with(replay={}, tenant=""),
    (SessionOpened.TYPE, 2): _with(altered_answer="refuse"),
    (TurnRecorded.TYPE, 1): _with(replay={}),
    (TurnRecorded.TYPE, 2): _with(altered=[]),
}
"""`(type, v)` → a pure function that turns the fields of version `v` into those of `v + 1`."""

_NUMBER: Final = (int, float)
_JSON: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    SessionOpened.TYPE: {
        "mode": str,
        "matcher": str,
        "altered_answer": str,
        "family": str,
        "max_trim_tokens": int,
        "template": str,
        "labels": dict,
        "pins": dict,
        "replay": dict,
        "tenant": str,
        "opened_at": _NUMBER,
    },
    TurnRecorded.TYPE: {
        "parent": int,
        "keep": int,
        "finish": str,
        "response_id": str,
        "messages": list,
        "tools": (list, type(None)),
        "altered": list,
        "request": dict,
        "reply": dict,
        "meta": dict,
        "replay": dict,
        "requested_at": _NUMBER,
        "committed_at": _NUMBER,
    },
    SessionSealed.TYPE: {"reason": str, "sealed_at": _NUMBER},
}
"""The fields that travel as JSON, and their types."""

for _kind in TYPES.values():
    _binary = _DTYPES if _kind is TurnRecorded else ()
    if {f.name for f in fields(_kind)} != {"id", *_JSON[_kind.TYPE], *_binary}:
        raise RuntimeError(f"the fields of {_kind.TYPE} are not all carried")
    if not {(_kind.TYPE, v) for v in range(1, _kind.VERSION)} <= UPCASTS.keys():
        raise RuntimeError(f"an older version of {_kind.TYPE} cannot be read")


def encode(event: Event) -> Fields:
    """The stream entry of an event, always in the newest version. Equal events give equal bytes.

    Raises:
        ValueError: a binary field is not one-dimensional, or holds a value that its dtype cannot.
    """
    json = {name: getattr(event, name) for name in _JSON[event.TYPE]}
    entry = {
        b"type": event.TYPE.encode(),
        b"v": str(event.VERSION).encode(),
        b"id": event.id.encode(),
        b"json": orjson.dumps(json),
    }
    if isinstance(event, TurnRecorded):
        for name, dtype in _DTYPES.items():
            entry[name.encode()] = _binary_field(name, getattr(event, name), dtype)
    return entry


def _binary_field(name: str, value: Any, dtype: np.dtype[Any]) -> bytes:
    """The exact bytes (INV-2): a wider id must not wrap."""
    array = np.asarray(value)
    if array.dtype == dtype and array.ndim == 1:
        return array.tobytes()
    with np.errstate(invalid="ignore"):
        wire = array.astype(dtype)
    if array.ndim != 1 or not np.array_equal(wire, array, equal_nan=True):
        raise ValueError(f"{name} does not fit {dtype}[n]: it is {array.dtype}{list(array.shape)}")
    return wire.tobytes()


def decode(entry: Fields, upcasts: Mapping[tuple[str, int], Upcast] = UPCASTS) -> Event:
    """Reads a stream entry of any version up to the newest.

    Raises:
        EventUnsupported: the type is unknown or the version is newer than this program.
        StreamCorrupt: the entry is damaged.
    """
    name, version = _header(entry)
    kind = TYPES.get(name)
    if kind is None:
        raise EventUnsupported(f"event type {name!r} is unknown to this version; upgrade it")
    if version > kind.VERSION:
        raise EventUnsupported(f"{name} v{version} is newer than this version's v{kind.VERSION}; upgrade it")
    try:
        for v in range(version, kind.VERSION):
            entry = upcasts[name, v](entry)
        json = orjson.loads(entry[b"json"])
        values: dict[str, Any] = {field: json[field] for field in _JSON[name]}
        for field, types in _JSON[name].items():
            if not isinstance(values[field], types) or isinstance(values[field], bool):
                raise TypeError(f"{field} is a {type(values[field]).__name__}")
        if kind is TurnRecorded:
            if not all(isinstance(message, dict) for message in values["messages"]):
                raise TypeError("messages holds something else than objects")
            for field, dtype in _DTYPES.items():
                values[field] = np.frombuffer(entry[field.encode()], dtype)
            values["replay"] = {of: _blob(given) for of, given in values["replay"].items()}
        elif kind is SessionOpened:
            values["replay"] = {of: ReplaySpec(**given) for of, given in values["replay"].items()}
        event = kind(id=entry[b"id"].decode(), **values)
    except (KeyError, ValueError, TypeError) as error:
        raise StreamCorrupt(f"{name} v{version} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(event, TurnRecorded) and len(event.output) != len(event.logprobs):
        raise StreamCorrupt(f"turn has {len(event.output)} tokens but {len(event.logprobs)} log-probs")
    return event


def _blob(given: Mapping[str, Any]) -> Blob:
    runs = tuple((int(first), int(count)) for first, count in given["stored"])
    blob = Blob(**{**given, "stored": runs})
    end = blob.start
    for first, count in runs:
        if first < end or count < 1:
            raise ValueError(f"the stored runs of a blob must ascend, not {runs}")
        end = first + count
    if end > blob.start + blob.rows or blob.dtype not in ("u1", "u2", "i4"):
        raise ValueError(f"a blob of {blob.rows} rows from {blob.start} cannot hold {runs} as {blob.dtype}")
    return blob


def _header(entry: Fields) -> tuple[str, int]:
    try:
        name, version = entry[b"type"].decode(), int(entry[b"v"])
    except (KeyError, ValueError) as error:
        raise StreamCorrupt(f"not an event: {type(error).__name__}: {error}") from error
    if version < 1:
        raise StreamCorrupt(f"{name} has version {version}")
    return name, version
