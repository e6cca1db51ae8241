"""What a job gives."""

import hashlib
from typing import Any

import numpy as np
import pytest

from tests.assembler.support import SID, job, opened, record, turn
from tokentape_assembler.outcome import outcome_of
from tokentape_contracts.errors import PrefixBroken, SessionNotFound, StoreUnavailable, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SessionSealed
from tokentape_contracts.samples import decode_samples
from tokentape_core.domain.state import turn_id
from tokentape_core.store import Entry, MemoryStore


def _decode(ids: object) -> str:
    return "".join(f"[{token}]" for token in np.asarray(ids))


async def test_samples_of_a_session() -> None:
    """The payload decodes to the one sample of the path, and its digest is its SHA-256."""
    store = MemoryStore()
    result = await outcome_of(job(await record(store, turns=3)), store, _decode)
    assert result.error is None
    assert result.digest == hashlib.sha256(result.payload).hexdigest()
    assert result.timing_ms.keys() == {"fold", "assemble", "encode"}
    reply = decode_samples(result.payload, contract=2)
    assert len(reply.samples[0]["tokens"]) == 3 * 6
    assert reply.session_metadata["accumulated_token_ids"] == reply.samples[0]["tokens"]


async def test_nothing_after_the_tail_is_seen() -> None:
    """A turn and a DELETE that come after the tail change no byte of the payload."""
    store = MemoryStore()
    asked = job(await record(store, turns=2))
    before = await outcome_of(asked, store, _decode)
    await store.append(SID, 3, turn(3, 12, [1], [2]))
    await store.seal(SID, SessionSealed(id="f" * 32, reason="deleted", sealed_at=9.0))
    after = await outcome_of(asked, store, _decode)
    assert after.payload == before.payload


async def test_a_session_without_turns() -> None:
    """A session without turns gives a payload that says `no_records`."""
    store = MemoryStore()
    await store.open(SID, opened())
    result = await outcome_of(job(OPENED_ID), store, _decode)
    assert decode_samples(result.payload, contract=2).empty_reason == "no_records"


async def test_refusals_are_outcomes() -> None:
    """A broken prefix, a missing tail and a session that is gone give errors, not exceptions."""
    store = MemoryStore()
    await store.open(SID, opened())
    await store.append(SID, 1, turn(1, 0, [1, 2], [3, 4]))
    await store.append(SID, 2, turn(2, 2, [9, 9, 5], [6]))
    broken = await outcome_of(job(turn_id(2)), store, _decode)
    cut = await outcome_of(job(turn_id(3)), store, _decode)
    gone = await outcome_of(job(turn_id(1), sid="other"), store, _decode)
    assert isinstance(broken.error, PrefixBroken)
    assert isinstance(cut.error, StreamCorrupt)
    assert isinstance(gone.error, SessionNotFound)
    assert [result.payload for result in (broken, cut, gone)] == [b"", b"", b""]


async def test_an_outage_is_no_outcome() -> None:
    """What may go well the next time is raised."""

    class Away(MemoryStore):
        async def read(self, *args: Any, **kwargs: Any) -> list[Entry]:
            raise StoreUnavailable("Redis cannot be reached")

    with pytest.raises(StoreUnavailable):
        await outcome_of(job(turn_id(1)), Away(), _decode)
