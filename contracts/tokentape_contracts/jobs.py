"""The job that an API process hands to the workers, and the result that comes back.

Both are JSON and raw bytes, never pickle: whoever can write to Redis must not be able to run code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson

from tokentape_contracts import limits
from tokentape_contracts.errors import BY_CODE, InternalError, TokentapeError

FUNCTION: Final = "assemble_samples"
"""The name under which workers register the job."""


@dataclass(frozen=True, slots=True)
class AssembleJob:
    """Assemble one session's samples.

    Attributes:
        session_id: the session.
        tail: stream id of the last entry to read, so that later turns and a DELETE change nothing.
        request: `SamplesRequest.digest`; with the session it names the outcome.
        contract: version of the samples format.
        max_seq_len: longest sample in tokens, or None.
        metadata: the agent's own JSON object, or None.
        trace: W3C Trace Context headers of the request that asks; no part of what the job is.
    """

    session_id: str
    tail: str
    request: str
    contract: int
    max_seq_len: int | None
    metadata: Mapping[str, Any] | None
    trace: Mapping[str, str] | None = field(default=None, compare=False)

    @property
    def job_id(self) -> str:
        """Equal for equal outcomes, so that equal concurrent requests share one job."""
        return f"{self.session_id}:{self.tail}:{self.request}"

    def to_json(self) -> dict[str, Any]:
        """Without `trace` if there is none: a worker of an earlier version does not know it."""
        fields = asdict(self)
        if self.trace is None:
            del fields["trace"]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "AssembleJob":
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class JobResult:
    """A deterministic outcome, as it is kept in Redis: a payload, or an error that would come again.

    Attributes:
        payload: the samples wire format; empty for an error.
        digest: SHA-256 of the payload, hex.
        timing_ms: stage → milliseconds: `fold`, `assemble`, `encode`.
        error: what refused the assembly.
    """

    payload: bytes
    digest: str
    timing_ms: Mapping[str, float]
    error: TokentapeError | None = None

    def to_hash(self) -> Iterator[tuple[str, bytes | memoryview]]:
        """The fields of the Redis hash: `head`, and the payload in parts `0`, `1` … of a bounded length."""
        error = [self.error.code, self.error.detail] if self.error else None
        view = memoryview(self.payload)
        starts = range(0, len(view), limits.STORE_VALUE_BYTES)
        head = {
            "size": len(view),
            "parts": len(starts),
            "digest": self.digest,
            "timing_ms": dict(self.timing_ms),
            "error": error,
        }
        yield HEAD, orjson.dumps(head)
        for part, start in enumerate(starts):
            yield str(part), view[start : start + limits.STORE_VALUE_BYTES]


HEAD: Final = "head"
"""The field of a result's hash that says what it is."""
FIRST_PART: Final = "0"
"""The field with the first part of its payload; the only one of most results."""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result as an API process finds it: what it is, and the first part of the payload.

    Attributes:
        size: bytes of the whole payload.
        parts: how many parts it has.
        first: its first part; empty for an error.
        digest, timing_ms, error: as in `JobResult`.
    """

    size: int
    parts: int
    first: bytes
    digest: str
    timing_ms: Mapping[str, float]
    error: TokentapeError | None

    @classmethod
    def from_fields(cls, head: bytes, first: bytes | None) -> "StoredResult":
        """Reads the two fields `HEAD` and `FIRST_PART`."""
        fields = orjson.loads(head)
        error = None
        if fields["error"] is not None:
            code, detail = fields["error"]
            error = BY_CODE.get(code, InternalError)(detail)
        size, parts = fields["size"], fields["parts"]
        return cls(size, parts, first or b"", fields["digest"], fields["timing_ms"], error)


def serialize(value: Any) -> bytes:
    """arq's job serializer: JSON; what JSON cannot hold (an exception of a failed job) as its text."""
    return orjson.dumps(value, default=str)


def deserialize(data: bytes) -> Any:
    """arq's job deserializer."""
    return orjson.loads(data)
