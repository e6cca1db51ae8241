"""What the Redis store promises beyond the port: life times, and errors of the server in our words."""

import pytest
import redis.asyncio

from tests.support.sessions import opened, sealed, turn
from tokentape_contracts import keys
from tokentape_contracts.errors import EventUnsupported, SessionDeleted, StreamCorrupt
from tokentape_contracts.events import encode
from tokentape_core.store import RedisStore, SeqTaken

IDLE_S = 1000
RETENTION_S = 5000


@pytest.fixture
def store(client: redis.asyncio.Redis) -> RedisStore:
    return RedisStore(client, idle_s=IDLE_S, retention_s=RETENTION_S)


async def _ttl(client: redis.asyncio.Redis, session_id: str) -> int:
    """Seconds that the stream has left; rounded up, as a second may have passed."""
    left: int = await client.ttl(keys.events(session_id))
    return left + (1 if left % 100 == 99 else 0)


async def test_an_open_session_expires(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """From the first entry on the stream has an end, so that nothing leaks when a driver dies."""
    await store.open(session_id, opened())
    assert await _ttl(client, session_id) == IDLE_S


async def test_a_turn_puts_the_end_off(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """Every append begins the idle time anew."""
    await store.open(session_id, opened())
    await client.expire(keys.events(session_id), 50)
    await store.append(session_id, 1, turn())
    assert await _ttl(client, session_id) == IDLE_S


async def test_a_seal_begins_the_retention(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """A sealed stream stays for the retention, whether that is longer or shorter than the idle time."""
    await store.open(session_id, opened())
    await store.seal(session_id, sealed())
    assert await _ttl(client, session_id) == RETENTION_S
    brief = RedisStore(client, idle_s=IDLE_S, retention_s=100)
    await brief.open(session_id + "x", opened())
    await brief.seal(session_id + "x", sealed())
    assert await _ttl(client, session_id + "x") == 100


async def test_a_late_turn_does_not_shorten_the_retention(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """A turn that comes after the seal is refused, and the stream stays as long as before."""
    await store.open(session_id, opened())
    await store.append(session_id, 1, mine := turn())
    await store.seal(session_id, sealed())
    with pytest.raises(SessionDeleted):
        await store.append(session_id, 2, turn())
    await store.append(session_id, 1, mine)
    assert await _ttl(client, session_id) == RETENTION_S


async def test_a_refused_append_of_an_unknown_session_leaves_no_key(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """Trying to append or to seal makes no stream."""
    for attempt in (store.append(session_id, 1, turn()), store.seal(session_id, sealed())):
        with pytest.raises(Exception, match="no such session"):
            await attempt
    assert await client.exists(keys.events(session_id)) == 0


async def test_the_stream_holds_the_events_bytes(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """An entry's fields are exactly what the contract's `encode` gives."""
    first, event, last = opened(), turn(), sealed()
    await store.open(session_id, first)
    await store.append(session_id, 1, event)
    await store.seal(session_id, last)
    rows = await client.xrange(keys.events(session_id))
    assert rows == [
        (b"0-1", encode(first)),
        (b"1-0", encode(event)),
        (b"18446744073709551615-18446744073709551615", encode(last)),
    ]


async def test_a_foreign_entry_is_found(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """Entries that are damaged or newer than this program are errors, never skipped."""
    await store.open(session_id, opened())
    await client.xadd(keys.events(session_id), {"type": "turn.recorded", "v": "1"}, id="1-0")
    with pytest.raises(StreamCorrupt):
        await store.read(session_id)
    await store.open(session_id + "x", opened())
    await client.xadd(keys.events(session_id + "x"), {"type": "turn.recorded", "v": "99"}, id="1-0")
    with pytest.raises(EventUnsupported):
        await store.read(session_id + "x")


async def test_a_stream_that_goes_on_beyond_the_seq_is_corrupt(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """A refusal without an entry at that id is a hole (or a foreign writer), not another writer's turn."""
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    await client.xadd(keys.events(session_id), {"type": "x"}, id="5-5")
    with pytest.raises(StreamCorrupt):
        await store.append(session_id, 2, turn())


async def test_a_session_that_expires_within_an_append_is_not_found(
    client: redis.asyncio.Redis, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the stream is gone when the refusal is looked into, the session is unknown, not corrupt."""
    store = RedisStore(client)
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    add = store._add

    async def add_then_expire(*args: object) -> str:
        outcome = await add(*args)  # type: ignore[arg-type]
        await client.delete(keys.events(session_id))
        return outcome

    monkeypatch.setattr(store, "_add", add_then_expire)
    with pytest.raises(Exception, match="no such session"):
        await store.append(session_id, 1, turn())


async def test_an_id_in_use_is_not_opened_again(store: RedisStore, session_id: str) -> None:
    """`SeqTaken` names the session, and its stream is not touched."""
    await store.open(session_id, opened())
    with pytest.raises(SeqTaken, match=session_id):
        await store.open(session_id, opened())
    assert len(await store.read(session_id)) == 1
