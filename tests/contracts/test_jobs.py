"""The job and its result, as they cross Redis."""

import orjson
import pytest

from tokentape_contracts.errors import TABLE, InternalError, TokentapeError
from tokentape_contracts.jobs import AssembleJob, JobResult, deserialize, serialize

JOB = AssembleJob("s1", "7-0", "d" * 32, 2, 4096, {"reward": 0.5, "nested": [{"a": None}]})


def test_a_job_crosses_the_queue() -> None:
    """A job is plain JSON and comes back equal."""
    assert AssembleJob.from_json(deserialize(serialize(JOB.to_json()))) == JOB


def test_equal_outcomes_share_a_job() -> None:
    """The job's id names the session, the tail and the request."""
    assert JOB.job_id == f"s1:7-0:{'d' * 32}"


def test_a_result_crosses_redis() -> None:
    """The payload's bytes, its digest and the timings come back."""
    result = JobResult(b"\x00\xffpayload", "ab" * 32, {"fold": 1.5, "encode": 0.0})
    assert JobResult.from_hash(result.to_hash()) == result


@pytest.mark.parametrize("error", TABLE)
def test_an_error_result_crosses_redis(error: type[TokentapeError]) -> None:
    """An error comes back as the same class with the same detail."""
    again = JobResult.from_hash(JobResult(b"", "", {}, error("why")).to_hash())
    assert type(again.error) is error
    assert again.error.detail == "why"


def test_an_unknown_error_code_is_a_defect() -> None:
    """A code that this version does not know is an internal error, with its detail."""
    fields = {
        b"head": orjson.dumps({"digest": "", "timing_ms": {}, "error": ["new", "why"]}),
        b"payload": b"",
    }
    error = JobResult.from_hash(fields).error
    assert type(error) is InternalError
    assert error.detail == "why"


def test_nothing_is_unpickled() -> None:
    """What JSON cannot hold travels as its text; bytes that are not JSON are refused, never run."""
    assert deserialize(serialize({"error": ValueError("boom")})) == {"error": "boom"}
    with pytest.raises(orjson.JSONDecodeError):
        deserialize(b"\x80\x04N.")
