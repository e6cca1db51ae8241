"""Whole sessions out of a store and into another, and the keys that audits and archives need."""

import asyncio
import time
from dataclasses import replace

import pytest
import redis.asyncio

from tests.store_contract.conftest import MakeStore
from tests.support.proxy import BreakingProxy
from tests.support.recordings import BLOB, DATA, KIND, assembled, content
from tests.support.sessions import opened, sealed, turn
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import SessionNotFound, StoreUnavailable
from tokentape_contracts.events import SEALED_ID, encode
from tokentape_core.recording import Recording, dump, ensure_whole, load
from tokentape_core.store import MemoryStore, RedisStore, SessionExists, Store, connect

RETENTION_S = 5000


async def recorded(store: Store, session_id: str, turns: int = 11) -> Recording:
    """A sealed session with routing replay rows, as the store gives it."""
    await store.open(session_id, opened(labels={"a": "ä"}))
    for seq in range(1, turns + 1):
        await store.append(session_id, seq, turn(replay={KIND: BLOB}), {KIND: DATA})
    await store.seal(session_id, sealed())
    found = await store.export(session_id)
    assert found is not None
    return found


async def test_a_session_goes_through_any_store(make_store: MakeStore, session_id: str) -> None:
    """Exported to a file, restored and exported again it is the same, seal and ids included."""
    source = MemoryStore()
    given = await recorded(source, session_id)
    given.audit.extend([("1700000000000-0", assembled()), ("1700000000000-5", assembled("2-0"))])
    store = make_store()
    assert await store.restore(load(dump([given]))[0])
    found = await make_store().export(session_id)
    assert found is not None
    assert content(found) == content(given)
    assert await store.tail(session_id) == SEALED_ID
    turns = ensure_whole(found).turns
    rows = await store.read_blobs(session_id, [(each.event, KIND) for each in turns])
    assert set(rows.values()) == {DATA}


async def test_what_a_store_wrote_is_what_events_encode(store: Store, session_id: str) -> None:
    """The exported fields are exactly the bytes of the events."""
    first, event = opened(), turn()
    await store.open(session_id, first)
    await store.append(session_id, 1, event)
    found = await store.export(session_id)
    assert found is not None
    assert found.events == [("0-1", encode(first)), ("1-0", encode(event))]
    assert (found.blobs, found.audit) == ({}, [])


async def test_older_versions_stay_what_they_are(store: Store, session_id: str) -> None:
    """An event of version 1 is restored as version 1, and fields that nobody knows stay."""
    old = {**encode(opened()), b"v": b"1", b"future": b"\xff\x00"}
    given = Recording(session_id, [("0-1", old)])
    await store.restore(given)
    found = await store.export(session_id)
    assert found is not None
    assert content(found) == content(given)


async def test_an_unknown_session_cannot_be_exported(store: Store, session_id: str) -> None:
    """There is nothing to export, and trying leaves nothing."""
    assert await store.export(session_id) is None
    assert await store.tail(session_id) is None


async def test_restoring_is_idempotent(store: Store, session_id: str) -> None:
    """The same session again is success and changes nothing, also after more was added to the audit."""
    given = await recorded(MemoryStore(), session_id)
    audit = [("5-0", assembled()), ("6-0", assembled())]
    assert await store.restore(replace(given, audit=audit))
    assert not await store.restore(replace(given, audit=audit))
    assert not await store.restore(replace(given, audit=audit[1:]))
    found = await store.export(session_id)
    assert found is not None
    assert content(found) == content(replace(given, audit=audit))


async def test_another_session_of_that_id_is_not_touched(store: Store, session_id: str) -> None:
    """Other events, other rows or a missing audit entry under the same id are refused; nothing changes."""
    here = await recorded(store, session_id)
    others = [
        await recorded(MemoryStore(), session_id),
        replace(here, events=here.events[:-1]),
        replace(here, blobs={name: data + b"x" for name, data in here.blobs.items()}),
        replace(here, audit=[("5-0", assembled())]),
    ]
    for other in others:
        with pytest.raises(SessionExists, match=session_id):
            await store.restore(other)
    found = await store.export(session_id)
    assert found is not None
    assert content(found) == content(here)


async def test_of_racing_imports_one_writes(make_store: MakeStore, session_id: str) -> None:
    """Of several restores of one session at once one writes it, and all succeed."""
    given = await recorded(MemoryStore(), session_id)
    stores = [make_store() for _ in range(5)]
    assert sorted(await asyncio.gather(*(store.restore(given) for store in stores))) == [False] * 4 + [True]


async def test_a_restored_session_stays_for_the_retention(
    client: redis.asyncio.Redis, session_id: str
) -> None:
    """All its keys expire together, and what an expired session of that id left over is gone."""
    store = RedisStore(client, retention_s=RETENTION_S)
    given = await recorded(MemoryStore(), session_id)
    given.audit.append(("1-0", assembled()))
    await client.xadd(keys.audit(session_id), {"left": "over"}, id="9-9")
    await client.hset(keys.blobs(session_id), "left", "over")  # type: ignore[misc]
    await store.restore(given)
    found = await store.export(session_id)
    assert found is not None
    assert content(found) == content(given)
    for key in (keys.events(session_id), keys.blobs(session_id), keys.audit(session_id)):
        assert RETENTION_S - 5 <= await client.ttl(key) <= RETENTION_S


async def test_a_lost_reply_of_an_import(valkey: EmbeddedValkey, session_id: str) -> None:
    """If the connection breaks after the transaction, the next look finds the session there."""
    given = await recorded(MemoryStore(), session_id)
    async with BreakingProxy(valkey.port) as proxy:
        client = connect(valkey.url.replace(f":{valkey.port}/", f":{proxy.port}/"))
        proxy.break_after(b"EXEC")
        assert not await RedisStore(client).restore(given)
        assert proxy.executed.is_set()
        await client.aclose()


async def test_a_seal_renews_the_audit(client: redis.asyncio.Redis, session_id: str) -> None:
    """The audit stays as long as the sealed stream."""
    store = RedisStore(client, retention_s=RETENTION_S)
    await store.open(session_id, opened())
    await client.xadd(keys.audit(session_id), {"a": "b"})
    await client.expire(keys.audit(session_id), 10)
    await store.seal(session_id, sealed())
    assert RETENTION_S - 5 <= await client.ttl(keys.audit(session_id)) <= RETENTION_S


async def test_sealed_sessions_are_indexed(client: redis.asyncio.Redis, session_id: str) -> None:
    """A seal puts the session into the index once; one of an unknown session does not, nor does an import."""
    store = RedisStore(client)
    await store.open(session_id, opened())
    for _ in range(2):
        await store.seal(session_id, sealed())
    score = await client.zscore(keys.SEALED, session_id)
    assert abs(score - time.time()) < 60
    with pytest.raises(SessionNotFound):
        await store.seal(session_id + "x", sealed())
    await store.restore(await recorded(MemoryStore(), session_id + "y"))
    for suffix in ("x", "y"):
        assert await client.zscore(keys.SEALED, session_id + suffix) is None
    await client.zrem(keys.SEALED, session_id)


async def test_the_index_comes_before_the_seal(
    client: redis.asyncio.Redis, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies between the two leaves an unsealed session in the index, never a lost one."""
    store = RedisStore(client)
    await store.open(session_id, opened())

    async def die(*_: object) -> str:
        raise StoreUnavailable("died")

    monkeypatch.setattr(store, "_add", die)
    with pytest.raises(StoreUnavailable):
        await store.seal(session_id, sealed())
    assert await client.zscore(keys.SEALED, session_id) is not None
    await client.zrem(keys.SEALED, session_id)


@pytest.mark.parametrize(
    ("retention_s", "kept_s"),
    [(RETENTION_S, 2 * limits.RETENTION_S), (2 * limits.RETENTION_S, 4 * limits.RETENTION_S)],
)
async def test_the_index_does_not_grow_for_ever(
    client: redis.asyncio.Redis, session_id: str, retention_s: int, kept_s: int
) -> None:
    """A seal drops what is older than twice the retention, never less than the default, and nothing else."""
    store = RedisStore(client, retention_s=retention_s)
    now = time.time()
    old, young = session_id + "old", session_id + "young"
    await client.zadd(keys.SEALED, {old: now - kept_s - 5, young: now - kept_s + 60})
    await store.open(session_id, opened())
    await store.seal(session_id, sealed())
    assert await client.zscore(keys.SEALED, old) is None
    assert await client.zscore(keys.SEALED, young) is not None
    await client.zrem(keys.SEALED, session_id, young)
