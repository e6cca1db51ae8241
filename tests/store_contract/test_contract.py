"""What every store promises: one suite over memory, an imitation of Redis, and a real server."""

import asyncio
import random
from typing import Any

import pytest

from tests.store_contract.conftest import MakeStore
from tests.support.sessions import opened, plain, sealed, turn
from tokentape_contracts.errors import SessionDeleted, SessionNotFound, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SEALED_ID, TurnRecorded
from tokentape_core.domain.state import fold
from tokentape_core.store import SeqTaken, Store

ROUNDS = 8
WRITERS = 6


async def _ids(store: Store, session_id: str, **bounds: str) -> list[str]:
    return [entry_id for entry_id, _ in await store.read(session_id, **bounds)]


async def test_events_come_back_in_order(store: Store, session_id: str) -> None:
    """Opening, turns and seal are read back as they were written, under their ids."""
    events: list[Any] = [opened(labels={"a": "ä"}), turn(), turn(parent=1, keep=3, output=[]), sealed()]
    await store.open(session_id, events[0])
    await store.append(session_id, 1, events[1])
    await store.append(session_id, 2, events[2])
    await store.seal(session_id, events[3])
    entries = await store.read(session_id)
    assert [entry_id for entry_id, _ in entries] == [OPENED_ID, "1-0", "2-0", SEALED_ID]
    assert [plain(event) for _, event in entries] == [plain(event) for event in events]


async def test_sessions_do_not_mix(store: Store, session_id: str) -> None:
    """What is written to one session is in no other."""
    await store.open(session_id, opened())
    await store.open(session_id + "x", opened())
    await store.append(session_id, 1, turn())
    assert await store.tail(session_id + "x") == OPENED_ID
    await store.seal(session_id + "x", sealed())
    await store.append(session_id, 2, turn())
    assert await store.tail(session_id) == "2-0"


async def test_the_tail_is_the_last_entry(store: Store, session_id: str) -> None:
    """After each write the tail names it."""
    tails = [await store.tail(session_id)]
    await store.open(session_id, opened())
    tails.append(await store.tail(session_id))
    for seq in range(1, 12):
        await store.append(session_id, seq, turn())
    tails.append(await store.tail(session_id))
    await store.seal(session_id, sealed())
    tails.append(await store.tail(session_id))
    assert tails == [None, OPENED_ID, "11-0", SEALED_ID]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, [OPENED_ID, "1-0", "2-0", "10-0", SEALED_ID]),
        ({"after": OPENED_ID}, ["1-0", "2-0", "10-0", SEALED_ID]),
        ({"after": "2-0"}, ["10-0", SEALED_ID]),
        ({"after": "5-0"}, ["10-0", SEALED_ID]),
        ({"after": "10-0"}, [SEALED_ID]),
        ({"after": SEALED_ID}, []),
        ({"until": OPENED_ID}, [OPENED_ID]),
        ({"until": "2-0"}, [OPENED_ID, "1-0", "2-0"]),
        ({"until": "9-0"}, [OPENED_ID, "1-0", "2-0"]),
        ({"until": SEALED_ID}, [OPENED_ID, "1-0", "2-0", "10-0", SEALED_ID]),
        ({"after": OPENED_ID, "until": "2-0"}, ["1-0", "2-0"]),
        ({"after": "2-0", "until": "2-0"}, []),
        ({"after": "10-0", "until": "1-0"}, []),
    ],
)
async def test_reading_between_bounds(
    store: Store, session_id: str, bounds: dict[str, str], expected: list[str]
) -> None:
    """`after` is left out, `until` is included, and neither needs to be an id that is there."""
    await store.open(session_id, opened())
    for seq in (1, 2, 10):
        await store.append(session_id, seq, turn())
    await store.seal(session_id, sealed())
    assert await _ids(store, session_id, **bounds) == expected


async def test_reading_up_to_a_tail_sees_nothing_later(store: Store, session_id: str) -> None:
    """A reader that fixed its tail is not changed by later turns or a seal (INV-8)."""
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    tail = await store.tail(session_id)
    await store.append(session_id, 2, turn())
    await store.seal(session_id, sealed())
    assert await _ids(store, session_id, until=str(tail)) == [OPENED_ID, "1-0"]


async def test_an_unknown_session(store: Store, session_id: str) -> None:
    """It has no entries and no tail, takes no turn and no seal, and does not come to be by trying."""
    with pytest.raises(SessionNotFound):
        await store.append(session_id, 1, turn())
    with pytest.raises(SessionNotFound):
        await store.seal(session_id, sealed())
    assert await store.tail(session_id) is None
    assert await store.read(session_id) == []
    assert await store.read(session_id, after="3-0", until="5-0") == []


async def test_a_seq_is_given_once(store: Store, session_id: str) -> None:
    """Another turn's seq is refused, at the head and below it, and the stream stays as it was."""
    await store.open(session_id, opened())
    first, second = turn(), turn()
    await store.append(session_id, 1, first)
    await store.append(session_id, 2, second)
    for seq in (1, 2):
        with pytest.raises(SeqTaken):
            await store.append(session_id, seq, turn())
    assert [event.id for _, event in (await store.read(session_id))[1:]] == [first.id, second.id]


async def test_the_same_event_again_is_success(store: Store, session_id: str) -> None:
    """Repeating an open or an append with the same event succeeds and adds nothing, also after later ones."""
    first, one, two = opened(), turn(), turn()
    for _ in range(2):
        await store.open(session_id, first)
        await store.append(session_id, 1, one)
    await store.append(session_id, 2, two)
    await store.append(session_id, 1, one)
    await store.open(session_id, first)
    assert await _ids(store, session_id) == [OPENED_ID, "1-0", "2-0"]


async def test_an_id_opens_one_session(store: Store, session_id: str) -> None:
    """Another event cannot open the same session: not at once, not after turns, not after the seal."""
    first = opened()
    await store.open(session_id, first)
    for step in (lambda: store.append(session_id, 1, turn()), lambda: store.seal(session_id, sealed())):
        with pytest.raises(SeqTaken):
            await store.open(session_id, opened())
        await step()
    with pytest.raises(SeqTaken):
        await store.open(session_id, opened())
    await store.open(session_id, first)
    assert (await store.read(session_id))[0][1].id == first.id


async def test_nothing_follows_the_seal(store: Store, session_id: str) -> None:
    """After the seal a new turn is refused at every seq, and nothing is added (INV-3)."""
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    await store.seal(session_id, sealed())
    for seq in (1, 2, 3, 1024):
        with pytest.raises(SessionDeleted):
            await store.append(session_id, seq, turn())
    assert await _ids(store, session_id) == [OPENED_ID, "1-0", SEALED_ID]


async def test_an_empty_session_can_be_sealed(store: Store, session_id: str) -> None:
    """A session without turns ends like any other."""
    await store.open(session_id, opened())
    await store.seal(session_id, sealed())
    with pytest.raises(SessionDeleted):
        await store.append(session_id, 1, turn())


async def test_ones_own_turn_is_recognised_after_the_seal(store: Store, session_id: str) -> None:
    """A writer that did not hear of its success finds out that it had it, though the session is sealed."""
    await store.open(session_id, opened())
    mine = turn()
    await store.append(session_id, 1, mine)
    await store.seal(session_id, sealed())
    await store.append(session_id, 1, mine)
    assert await _ids(store, session_id) == [OPENED_ID, "1-0", SEALED_ID]


async def test_sealing_is_idempotent(store: Store, session_id: str) -> None:
    """Any number of seals, by anyone, leave the first (INV-8)."""
    await store.open(session_id, opened())
    first = sealed()
    for event in (first, first, sealed(), sealed(reason="other")):
        await store.seal(session_id, event)
    assert [event.id for _, event in await store.read(session_id, after=OPENED_ID)] == [first.id]


async def test_a_hole_stays_visible(store: Store, session_id: str) -> None:
    """A store does not check that seqs are contiguous, but a hole cannot be filled, and readers see it."""
    await store.open(session_id, opened())
    await store.append(session_id, 3, turn())
    with pytest.raises(StreamCorrupt, match="1-0"):
        await store.append(session_id, 1, turn())
    with pytest.raises(StreamCorrupt):
        fold(await store.read(session_id))


async def test_a_store_that_answers_is_ready(store: Store) -> None:
    """`ready` returns."""
    assert await store.ready() is None


async def test_stores_share_their_streams(make_store: MakeStore, session_id: str) -> None:
    """What one process wrote another reads, continues and ends (INV-4)."""
    one, two, three = make_store(), make_store(), make_store()
    await one.open(session_id, opened())
    await two.append(session_id, 1, turn())
    with pytest.raises(SeqTaken):
        await three.append(session_id, 1, turn())
    await three.append(session_id, 2, turn())
    await two.seal(session_id, sealed())
    with pytest.raises(SessionDeleted):
        await one.append(session_id, 3, turn())
    assert await _ids(one, session_id) == [OPENED_ID, "1-0", "2-0", SEALED_ID]


async def test_of_writers_of_one_seq_one_wins(make_store: MakeStore, session_id: str) -> None:
    """All but one of them hear `SeqTaken`, and the winner's event is the one that is stored."""
    stores = [make_store() for _ in range(WRITERS)]
    await stores[0].open(session_id, opened())
    for seq in range(1, 6):
        events = [turn() for _ in stores]
        outcomes = await asyncio.gather(
            *(store.append(session_id, seq, event) for store, event in zip(stores, events, strict=True)),
            return_exceptions=True,
        )
        winners = [event.id for event, outcome in zip(events, outcomes, strict=True) if outcome is None]
        assert sum(isinstance(outcome, SeqTaken) for outcome in outcomes) == WRITERS - 1
        [(_, stored)] = await stores[0].read(session_id, after=f"{seq - 1}-0" if seq > 1 else OPENED_ID)
        assert winners == [stored.id]


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_racing_writers_and_a_deleter(make_store: MakeStore, session_id: str, seed: int) -> None:
    """No turn that was acknowledged is lost or doubled, none that was refused is stored, none is too late."""
    print("seed", seed)
    randomness = random.Random(seed)
    stop_after = randomness.randrange(60)
    acknowledged: list[str] = []
    enough = asyncio.Event()
    refused: list[str] = []

    async def write(store: Store) -> None:
        seq = 1
        while True:
            event = turn(suffix=[seq], output=[])
            try:
                while not await _appended(store, session_id, seq, event):
                    seq += 1
            except SessionDeleted:
                refused.append(event.id)
                return
            acknowledged.append(event.id)
            if len(acknowledged) > stop_after:
                enough.set()
            if randomness.random() < 0.3:
                await store.append(session_id, seq, event)
            await asyncio.sleep(0)

    async def delete(store: Store) -> None:
        await enough.wait()
        await store.seal(session_id, sealed())

    stores = [make_store() for _ in range(WRITERS + 2)]
    await stores[0].open(session_id, opened())
    async with asyncio.timeout(30):
        await asyncio.gather(*map(write, stores[:WRITERS]), *map(delete, stores[WRITERS:]))
    entries = await stores[0].read(session_id)
    state = fold(entries)
    assert state is not None
    assert state.sealed is not None
    stored = [recorded.event.id for recorded in state.turns]
    assert sorted(stored) == sorted(acknowledged)
    assert len(refused) == WRITERS
    assert len(entries) == len(stored) + 2


async def _appended(store: Store, session_id: str, seq: int, event: TurnRecorded) -> bool:
    try:
        await store.append(session_id, seq, event)
    except SeqTaken:
        return False
    return True
