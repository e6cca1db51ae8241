"""Whole sessions outside of Redis: every byte that is kept of them, and its form as a file.

A file is a safetensors container. Each tensor is uint8[n], the bytes of one value in Redis:

    <session id>/events/<entry id>/<place>/<field>   a field of a stream entry; `place` counts them from 0
    <session id>/audit/<entry id>/<place>/<field>    the same of the audit stream
    <session id>/blobs/<field>                       a field of the hash of routing replay rows

Fields are written as Latin-1, which has a character for every byte. `__metadata__` has one key, `tokentape`,
a JSON object: `format`, the version of all this, and `sha256`, the digest over all tensors in the order of
their UTF-8 names: the name's length (uint64, little-endian), the name, the data's length, the data. It finds
damage; it does not say who wrote the file.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import orjson
import safetensors
import safetensors.numpy

from tokentape_contracts import audit, keys, limits
from tokentape_contracts.errors import EventUnsupported, StreamCorrupt
from tokentape_contracts.events import Fields, TurnRecorded, decode
from tokentape_contracts.tokens import first_bad_id, first_bad_log_prob
from tokentape_core.domain.state import SessionState, Turn, fold

FORMAT: Final = 1
SUFFIX: Final = ".tokentape"
"""How names of such files end."""

_LABEL: Final = "tokentape"

RawEntry = tuple[str, Fields]
"""A stream entry as Redis has it: its id and its fields."""


class RecordingError(Exception):
    """A file is no recording of this version, or a recording is not whole; one sentence for a person."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """All that is kept of one session, to the byte.

    Attributes:
        session_id: the session.
        events: its stream.
        blobs: field → bytes, of the hash of its routing replay rows.
        audit: its audit stream.
    """

    session_id: str
    events: list[RawEntry] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    audit: list[RawEntry] = field(default_factory=list)

    def contains(self, other: "Recording") -> bool:
        """Whether the events are the same, and the other's routing replay rows and audit entries are here."""
        return (
            self.events == other.events
            and other.blobs.items() <= self.blobs.items()
            and all(entry in self.audit for entry in other.audit)
        )


def part_names(event: TurnRecorded, kind: str) -> list[str]:
    """The fields of `keys.blobs` that hold one turn's rows of one kind."""
    return [keys.blob_part(event.id, kind, part) for part in range(event.replay[kind].parts)]


def ensure_whole(recording: Recording) -> SessionState:
    """The state that the events give, if they are contiguous and nothing that they refer to is missing.

    Raises:
        RecordingError: they are not; an entry cannot be read; a turn holds a number that is no id or no
            log-prob; a part of a blob is too long to be written.
    """
    where = f"session {recording.session_id}"
    try:
        state = fold((entry_id, decode(fields)) for entry_id, fields in recording.events)
        for _, fields in recording.audit:
            audit.decode(fields)
    except (EventUnsupported, StreamCorrupt) as error:
        raise RecordingError(f"{where}: {error.detail}") from error
    if state is None:
        raise RecordingError(f"{where} has no events")
    _ensure_ascending([entry_id for entry_id, _ in recording.audit], where)
    for turn in state.turns:
        _ensure_possible(turn, where)
        for kind in turn.event.replay:
            if gone := [name for name in part_names(turn.event, kind) if name not in recording.blobs]:
                raise RecordingError(
                    f"{where}: routing replay rows of turn {turn.seq} are missing: {gone[0]}"
                )
    if long := [name for name, data in recording.blobs.items() if len(data) > limits.STORE_VALUE_BYTES]:
        raise RecordingError(
            f"{where}: the part {long[0]} of routing replay rows is above {limits.STORE_VALUE_BYTES} B"
        )
    return state


def _ensure_possible(turn: Turn, where: str) -> None:
    """Numbers that no server records: those of another program, which a trainer would learn from."""
    event = turn.event
    for name, ids in (("prompt", event.suffix), ("output", event.output)):
        if (bad := first_bad_id(ids)) is not None:
            raise RecordingError(f"{where}: turn {turn.seq} holds the negative id {ids[bad]} in its {name}")
    if (bad := first_bad_log_prob(event.logprobs)) is not None:
        raise RecordingError(
            f"{where}: turn {turn.seq} holds {event.logprobs[bad]} as the log-prob of output token {bad}"
        )


def _ensure_ascending(entry_ids: Sequence[str], where: str) -> None:
    order = [(0, 0), *map(_order, entry_ids)]
    if entry_ids != [f"{milliseconds}-{number}" for milliseconds, number in order[1:]] or any(
        after <= before for before, after in pairwise(order)
    ):
        raise RecordingError(f"{where}: the ids of its audit do not ascend")


def dump(recordings: Sequence[Recording]) -> bytes:
    """The file that holds these sessions. Equal recordings give equal bytes."""
    values = {name: data for recording in recordings for name, data in _values(recording)}
    label = orjson.dumps({"format": FORMAT, "sha256": _digest(values)}).decode()
    tensors = {name: np.frombuffer(data, np.uint8) for name, data in values.items()}
    return safetensors.numpy.save(tensors, {_LABEL: label})


def load(data: bytes) -> list[Recording]:
    """The sessions of a file, in the order of their ids; whether each is whole is for `ensure_whole` to say.

    Raises:
        RecordingError: the bytes are damaged, of a newer version, or no such file.
    """
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        metadata = _metadata(data)
    except (safetensors.SafetensorError, ValueError) as error:
        raise RecordingError(f"not a file of Tokentape, or cut off: {error}") from error
    wanted = _checked_label(metadata)
    values = {name: bytes(tensor["data"]) for name, tensor in tensors}
    if any(tensor["dtype"] != "U8" or len(tensor["shape"]) != 1 for _, tensor in tensors):
        raise RecordingError("the file is damaged: it holds something else than bytes")
    if len(values) != len(tensors) or _digest(values) != wanted:
        raise RecordingError("the file is damaged: its checksum is not that of its content")
    return _recordings(values)


def _values(recording: Recording) -> Iterator[tuple[str, bytes]]:
    sid = recording.session_id
    if not sid or "/" in sid:
        raise ValueError(f"{sid!r} cannot be a session id")
    for stream, entries in (("events", recording.events), ("audit", recording.audit)):
        for entry_id, fields in entries:
            for place, (name, data) in enumerate(fields.items()):
                yield f"{sid}/{stream}/{entry_id}/{place}/{name.decode('latin-1')}", data
    for blob, data in recording.blobs.items():
        yield f"{sid}/blobs/{blob}", data


def _digest(values: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted((name.encode(), data) for name, data in values.items()):
        for part in (name, data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _metadata(data: bytes) -> Mapping[str, str]:
    """`__metadata__`, which the library gives for files only."""
    header: dict[str, Any] = orjson.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: Mapping[str, str] = header.get("__metadata__", {})
    return metadata


def _checked_label(metadata: Mapping[str, str]) -> str:
    """The checksum."""
    try:
        label = orjson.loads(metadata[_LABEL])
        version, digest = int(label["format"]), str(label["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError("not a file of Tokentape: it has no such label") from error
    if version > FORMAT:
        raise RecordingError(f"the file has format {version}; this version reads {FORMAT}: upgrade it")
    if version < 1:
        raise RecordingError(f"the file is damaged: format {version}")
    return digest


def _recordings(values: Mapping[str, bytes]) -> list[Recording]:
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, data in values.items():
            sid, kind, rest = name.split("/", 2)
            if not sid:
                raise ValueError(f"{name!r} is of no session")
            parts = found.setdefault(sid, {"events": {}, "audit": {}, "blobs": {}})
            if kind == "blobs":
                parts[kind][rest] = data
            else:
                entry_id, place, field_name = rest.split("/", 2)
                parts[kind].setdefault(entry_id, {})[int(place)] = (field_name.encode("latin-1"), data)
        return [
            Recording(sid, _entries(parts["events"]), parts["blobs"], _entries(parts["audit"]))
            for sid, parts in sorted(found.items())
        ]
    except (KeyError, ValueError) as error:
        raise RecordingError(f"the file is damaged: a name is not one of ours: {error}") from error


def _entries(found: Mapping[str, Mapping[int, tuple[bytes, bytes]]]) -> list[RawEntry]:
    return [(entry_id, _fields(found[entry_id].items())) for entry_id in sorted(found, key=_order)]


def _fields(places: Iterable[tuple[int, tuple[bytes, bytes]]]) -> Fields:
    return dict(content for _, content in sorted(places))


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)
