"""Writers that use the store alone, as fast as it goes, and remember what was acknowledged."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import redis.asyncio

from tests.support.recordings import BLOB, DATA, KIND
from tests.support.sessions import opened, turn
from tokentape_contracts import keys
from tokentape_contracts.errors import TokentapeError
from tokentape_contracts.events import OPENED_ID, TurnRecorded, decode
from tokentape_core.domain.state import turn_id
from tokentape_core.store import SeqTaken, Store


@dataclass
class Writers:
    """Two writers a session, which race for every turn.

    Attributes:
        acknowledged: session → event id → seq, of all that the store said is written.
        errors: what the store raised.
        times: seconds that each acknowledged append took.
    """

    stores: Sequence[Store]
    session_ids: list[str]
    pause_s: float = 0.002
    acknowledged: dict[str, dict[str, int]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _stopping: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens the sessions and writes while the block lasts."""
        for session_id in self.session_ids:
            await self.open(session_id)
        tasks = [
            asyncio.create_task(self._write(session_id, store))
            for number, session_id in enumerate(self.session_ids)
            for store in (
                self.stores[number % len(self.stores)],
                self.stores[(number + 1) % len(self.stores)],
            )
        ]
        try:
            yield
        finally:
            self._stopping = True
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def open(self, session_id: str) -> None:
        """Opens one session, which nobody writes to yet."""
        event = opened()
        await self.stores[0].open(session_id, event)
        self.acknowledged.setdefault(session_id, {})[event.id] = 0

    async def _write(self, session_id: str, store: Store) -> None:
        draw = random.Random(session_id)
        seq = 1
        while not self._stopping:
            event = turn(id=uuid4().hex)
            blobs = {}
            if draw.random() < 0.3:
                event, blobs = turn(id=event.id, replay={KIND: BLOB}), {KIND: DATA}
            began = time.monotonic()
            while not self._stopping:
                try:
                    await store.append(session_id, seq, event, blobs)
                except SeqTaken:
                    seq += 1
                except TokentapeError as error:
                    self.errors.append(f"{error.code}: {error.detail}")
                    break
                else:
                    self.acknowledged[session_id][event.id] = seq
                    self.times.append(time.monotonic() - began)
                    seq += 1
                    break
            await asyncio.sleep(self.pause_s)


@dataclass
class Found:
    """What is in Redis after all.

    Attributes:
        acknowledged: events that the store said are written.
        lost: of these, not where they were written.
        doubled: events beyond the first of an id.
        gaps: sessions whose turns are not 1, 2, 3 …
    """

    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    gaps: int = 0


async def found(client: redis.asyncio.Redis, writers: Writers) -> Found:
    """Compares what was acknowledged with what a client reads; rows of every turn included."""
    result = Found()
    for session_id, acknowledged in writers.acknowledged.items():
        rows = await client.xrange(keys.events(session_id))
        blobs = set(await client.hkeys(keys.blobs(session_id)))  # type: ignore[misc]
        entries = {entry_id.decode(): decode(fields) for entry_id, fields in rows}
        times = Counter(event.id for event in entries.values())
        result.doubled += sum(times.values()) - len(times)
        expected = [OPENED_ID, *(turn_id(seq) for seq in range(1, len(entries)))]
        result.gaps += bool(entries) and list(entries) != expected
        for event_id, seq in acknowledged.items():
            result.acknowledged += 1
            event = entries.get(turn_id(seq) if seq else OPENED_ID)
            has_rows = not (isinstance(event, TurnRecorded) and event.replay) or any(
                name.startswith(event.id.encode()) for name in blobs
            )
            result.lost += event is None or event.id != event_id or not has_rows
    return result


def in_slot(slot: int, slot_of: Callable[[bytes], int]) -> str:
    """A new session id whose keys lie in that slot."""
    while True:
        session_id = uuid4().hex
        if slot_of(session_id.encode()) == slot:
            return session_id
