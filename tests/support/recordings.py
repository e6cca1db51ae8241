"""Whole sessions with everything that a session may have."""

import asyncio

import numpy as np

from tests.support.sessions import new_id, opened, sealed, turn
from tokentape_contracts import audit, limits
from tokentape_contracts.audit import AssembledBy, SamplesAssembled
from tokentape_contracts.events import Fields
from tokentape_core.domain.replay import Rows, deduplicate
from tokentape_core.recording import Recording
from tokentape_core.store import MemoryStore

KIND = "routed_experts"
ROWS = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)
BLOB, DATA = deduplicate(Rows(0, ROWS), None, KIND, {}, limits.STORE_VALUE_BYTES)


def assembled(tail: str = "1-0") -> Fields:
    """The fields of an audit entry."""
    by = AssembledBy(tokentape="1", tokenizer="t", template=None, pick="p", finish="f")
    return audit.encode(
        SamplesAssembled(
            id=new_id(),
            tail=tail,
            request="r",
            contract=1,
            max_seq_len=None,
            metadata=None,
            digest="d",
            error=None,
            samples=1,
            by=by,
            at=1.0,
        )
    )


def recording(session_id: str = "s1", turns: int = 11) -> Recording:
    """A sealed session with more than nine turns, routing replay rows and an audit."""
    store = MemoryStore()

    async def record() -> Recording | None:
        await store.open(session_id, opened(labels={"a": "ä\0"}))
        for seq in range(1, turns + 1):
            await store.append(
                session_id, seq, turn(replay={KIND: BLOB}, output=[] if seq == 1 else [3]), {KIND: DATA}
            )
        await store.seal(session_id, sealed())
        return await store.export(session_id)

    found = asyncio.run(record())
    assert found is not None
    found.audit.extend([("1700000000000-0", assembled()), ("1700000000000-1", assembled("2-0"))])
    return found


def content(of: Recording) -> object:
    """A recording with the order of everything in it."""
    streams = [[(i, list(entry.items())) for i, entry in entries] for entries in (of.events, of.audit)]
    return of.session_id, streams, of.blobs
