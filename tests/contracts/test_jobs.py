"""The job and its result, as they cross Redis."""

import orjson
import pytest

from tokentape_contracts import limits
from tokentape_contracts.errors import TABLE, InternalError, TokentapeError
from tokentape_contracts.jobs import (
    FIRST_PART,
    HEAD,
    AssembleJob,
    JobResult,
    StoredResult,
    deserialize,
    serialize,
)

JOB = AssembleJob("s1", "7-0", "d" * 32, 2, 4096, {"reward": 0.5, "nested": [{"a": None}]})


def test_a_job_crosses_the_queue() -> None:
    """A job is plain JSON and comes back equal."""
    assert AssembleJob.from_json(deserialize(serialize(JOB.to_json()))) == JOB


def test_equal_outcomes_share_a_job() -> None:
    """The job's id names the session, the tail and the request."""
    assert JOB.job_id == f"s1:7-0:{'d' * 32}"


def _stored(result: JobResult) -> StoredResult:
    fields = {name: bytes(value) for name, value in result.to_hash()}
    return StoredResult.from_fields(fields[HEAD], fields.get(FIRST_PART))


def test_a_result_crosses_redis() -> None:
    """The payload's bytes, its digest and the timings come back."""
    stored = _stored(JobResult(b"\x00\xffpayload", "ab" * 32, {"fold": 1.5, "encode": 0.0}))
    assert (stored.first, stored.size, stored.parts) == (b"\x00\xffpayload", 9, 1)
    assert (stored.digest, stored.timing_ms) == ("ab" * 32, {"fold": 1.5, "encode": 0.0})


def test_a_large_result_is_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part is longer than the limit of one value, and together they are the payload."""
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", 4)
    result = JobResult(b"0123456789", "", {})
    parts = [bytes(value) for name, value in result.to_hash() if name != HEAD]
    assert parts == [b"0123", b"4567", b"89"]
    assert _stored(result).parts == 3


@pytest.mark.parametrize("error", TABLE)
def test_an_error_result_crosses_redis(error: type[TokentapeError]) -> None:
    """An error comes back as the same class with the same detail."""
    again = _stored(JobResult(b"", "", {}, error("why")))
    assert type(again.error) is error
    assert again.error.detail == "why"


def test_an_unknown_error_code_is_a_defect() -> None:
    """A code that this version does not know is an internal error, with its detail."""
    head = orjson.dumps({"size": 0, "parts": 0, "digest": "", "timing_ms": {}, "error": ["new", "why"]})
    error = StoredResult.from_fields(head, None).error
    assert type(error) is InternalError
    assert error.detail == "why"


@pytest.mark.parametrize("readers", [8, 16])
def test_the_writer_says_how_many_parts_there_are(monkeypatch: pytest.MonkeyPatch, readers: int) -> None:
    """A reader of a version with another limit does not take the first part for the whole."""
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", 4)
    fields = {name: bytes(value) for name, value in JobResult(b"0123456789", "", {}).to_hash()}
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", readers)
    assert StoredResult.from_fields(fields[HEAD], fields[FIRST_PART]).parts == 3


def test_nothing_is_unpickled() -> None:
    """What JSON cannot hold travels as its text; bytes that are not JSON are refused, never run."""
    assert deserialize(serialize({"error": ValueError("boom")})) == {"error": "boom"}
    with pytest.raises(orjson.JSONDecodeError):
        deserialize(b"\x80\x04N.")
