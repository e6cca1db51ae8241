"""Bounds of the Redis store that are times and connections: within them, and beyond."""

import asyncio
import time
from uuid import uuid4

import pytest
import redis.asyncio

from tests.support.sessions import opened, sealed, turn
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import SessionNotFound, StoreUnavailable
from tokentape_core.store import RedisStore, connect, redis_errors


async def test_the_defaults_are_the_limits(client: redis.asyncio.Redis, session_id: str) -> None:
    """A session that nobody uses lives for the idle time, and a deleted one for the retention."""
    store = RedisStore(client)
    await store.open(session_id, opened())
    assert limits.SESSION_IDLE_S - 5 < await client.ttl(keys.events(session_id)) <= limits.SESSION_IDLE_S
    await store.seal(session_id, sealed())
    assert limits.RETENTION_S - 5 < await client.ttl(keys.events(session_id)) <= limits.RETENTION_S


async def test_an_idle_session_is_gone_after_its_time(client: redis.asyncio.Redis, session_id: str) -> None:
    """Before the end of the idle time it takes a turn, which begins the time anew; after it there is none."""
    store = RedisStore(client, idle_s=3)
    await store.open(session_id, opened())
    await asyncio.sleep(1.6)
    await store.append(session_id, 1, turn())
    await asyncio.sleep(1.6)
    assert len(await store.read(session_id)) == 2
    await asyncio.sleep(2.0)
    with pytest.raises(SessionNotFound):
        await store.append(session_id, 2, turn())


async def test_a_deleted_session_is_gone_after_the_retention(
    client: redis.asyncio.Redis, session_id: str
) -> None:
    """It can be read for the retention, and then no more."""
    store = RedisStore(client, retention_s=2)
    await store.open(session_id, opened())
    await store.seal(session_id, sealed())
    assert len(await store.read(session_id)) == 2
    await asyncio.sleep(2.2)
    assert await store.read(session_id) == []


async def test_connections(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many commands as the limit run at the same time; one more waits, and not for ever."""
    monkeypatch.setattr(limits, "STORE_CONNECTIONS", 2)
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.4)
    client = connect(valkey.url)
    empty = f"t:{uuid4().hex}"
    held = [asyncio.create_task(client.blpop([empty], timeout=0.7)) for _ in range(2)]  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable), redis_errors():
        await client.get(empty)
    assert time.monotonic() - began < 0.9
    waiting = asyncio.create_task(client.get(empty))
    assert await asyncio.gather(*held) == [None, None]
    assert await waiting is None
    await client.aclose()
