"""The audit of a session: what was assembled from its events, and how, so that it can be assembled again.

Beside its events a session has a second stream, `keys.audit`. A worker adds one `samples.assembled` to it in
the transaction that stores a result. An entry has the fields of an event (`type`, `v`, `id`, `json`), and the
same rules hold for its versions; its stream id is Redis's own, hence their order is that of the results.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final

import orjson

from tokentape_contracts.errors import EventUnsupported, StreamCorrupt
from tokentape_contracts.events import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledBy:
    """What assembled, apart from the events: equal ones give equal payloads of equal events.

    Attributes:
        tokentape: version of the package.
        tokenizer: fingerprint of the tokenizer and its chat template; empty if it is not known.
        template: fingerprint of tokenizer, template and family with which sessions of the same fingerprint
            are compared (`tito_session_mismatch`); None without a chat template.
        pick: import path of the hook that picked a tree's leaves.
        finish: import path of the hook that finished a tree's samples.
    """

    tokentape: str
    tokenizer: str
    template: str | None
    pick: str
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesAssembled:
    """A worker assembled the samples of a request, or refused them for a reason that would come again.

    Attributes:
        id: uuid of the entry.
        tail: id of the last event that was read.
        request: `SamplesRequest.digest`; names the outcome within the session.
        contract: version of the samples format.
        max_seq_len: the request's longest sample in tokens, or None.
        metadata: the request's JSON object, which a tree's samples depend on, or None.
        digest: SHA-256 of the payload, hex; None for a refusal.
        error: code and detail of the refusal, or None.
        samples: how many the payload holds.
        by: what assembled.
        at: Unix seconds; decoration.
    """

    TYPE: ClassVar[str] = "samples.assembled"
    VERSION: ClassVar[int] = 1

    id: str
    tail: str
    request: str
    contract: int
    max_seq_len: int | None
    metadata: Mapping[str, Any] | None
    digest: str | None
    error: tuple[str, str] | None
    samples: int
    by: AssembledBy
    at: float


_NONE: Final = type(None)
_JSON: Final[Mapping[str, type | tuple[type, ...]]] = {
    "tail": str,
    "request": str,
    "contract": int,
    "max_seq_len": (int, _NONE),
    "metadata": (dict, _NONE),
    "digest": (str, _NONE),
    "error": (list, _NONE),
    "samples": int,
    "by": dict,
    "at": (int, float),
}
_BY: Final[Mapping[str, type | tuple[type, ...]]] = {
    "tokentape": str,
    "tokenizer": str,
    "template": (str, _NONE),
    "pick": str,
    "finish": str,
}

if {f.name for f in fields(SamplesAssembled)} != {"id", *_JSON} or {
    f.name for f in fields(AssembledBy)
} != set(_BY):
    raise RuntimeError(f"the fields of {SamplesAssembled.TYPE} are not all carried")


def encode(entry: SamplesAssembled) -> Fields:
    """The stream entry, in the newest version. Equal ones give equal bytes."""
    json = {name: getattr(entry, name) for name in _JSON}
    return {
        b"type": entry.TYPE.encode(),
        b"v": str(entry.VERSION).encode(),
        b"id": entry.id.encode(),
        b"json": orjson.dumps({**json, "by": asdict(entry.by)}),
    }


def decode(entry: Fields) -> SamplesAssembled:
    """Reads an entry of the audit stream.

    Raises:
        EventUnsupported: the type is unknown or the version is newer than this program.
        StreamCorrupt: the entry is damaged.
    """
    try:
        name, version = entry[b"type"].decode(), int(entry[b"v"])
    except (KeyError, ValueError) as error:
        raise StreamCorrupt(f"not an audit entry: {type(error).__name__}: {error}") from error
    if name != SamplesAssembled.TYPE:
        raise EventUnsupported(f"audit entry {name!r} is unknown to this version; upgrade it")
    if version > SamplesAssembled.VERSION:
        newest = SamplesAssembled.VERSION
        raise EventUnsupported(f"{name} v{version} is newer than this version's v{newest}; upgrade it")
    try:
        if version < 1:
            raise ValueError(f"version {version}")
        values = _checked(orjson.loads(entry[b"json"]), _JSON)
        values["by"] = AssembledBy(**_checked(values["by"], _BY))
        if values["error"] is not None:
            code, detail = values["error"]
            values["error"] = (str(code), str(detail))
        if (values["digest"] is None) == (values["error"] is None):
            raise ValueError("it needs either a digest or an error")
        return SamplesAssembled(id=entry[b"id"].decode(), **values)
    except (KeyError, ValueError, TypeError) as error:
        raise StreamCorrupt(f"{name} v{version} cannot be read: {type(error).__name__}: {error}") from error


def _checked(json: Any, table: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The fields of a table, each of its type."""
    if not isinstance(json, dict):
        raise TypeError(f"a {type(json).__name__} instead of an object")
    values = {name: json[name] for name in table}
    for name, value in values.items():
        if not isinstance(value, table[name]) or isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}")
    return values
