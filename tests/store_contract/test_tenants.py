"""How many sessions a tenant may have open."""

import asyncio
from uuid import uuid4

import pytest
import redis.asyncio

from tests.support.sessions import opened, sealed
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import TooManySessions
from tokentape_core.store import RedisStore, Store


@pytest.fixture
def tenant() -> str:
    """A tenant without sessions."""
    return f"t-{uuid4().hex}"


@pytest.fixture(autouse=True)
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS_PER_TENANT", 3)


def ids(count: int) -> list[str]:
    return [uuid4().hex for _ in range(count)]


async def test_as_many_as_the_limit(store: Store, tenant: str) -> None:
    """A tenant has as many open sessions as the limit says, and not one more; another is not touched."""
    for session_id in ids(3):
        await store.open(session_id, opened(tenant=tenant))
    [refused, other] = ids(2)
    with pytest.raises(TooManySessions, match="3 sessions are open"):
        await store.open(refused, opened(tenant=tenant))
    assert await store.tail(refused) is None
    await store.open(other, opened(tenant=f"{tenant}2"))


async def test_a_deleted_session_frees_its_place_once(store: Store, tenant: str) -> None:
    """A DELETE frees one place, and a repeated one frees no other."""
    first, *rest = ids(3)
    for session_id in (first, *rest):
        await store.open(session_id, opened(tenant=tenant))
    for _ in range(3):
        await store.seal(first, sealed())
    await store.open(uuid4().hex, opened(tenant=tenant))
    with pytest.raises(TooManySessions):
        await store.open(uuid4().hex, opened(tenant=tenant))


async def test_a_repeated_opening_counts_once(store: Store, tenant: str) -> None:
    """The same opening, sent again, takes no second place."""
    first, *rest = ids(3)
    event = opened(tenant=tenant)
    for session_id in (first, first, *rest, first):
        await store.open(session_id, event if session_id == first else opened(tenant=tenant))


async def test_openings_at_the_same_time_do_not_pass_the_limit(store: Store, tenant: str) -> None:
    """Of twelve concurrent openings no more succeed than there are places."""
    outcomes = await asyncio.gather(
        *(store.open(session_id, opened(tenant=tenant)) for session_id in ids(12)), return_exceptions=True
    )
    assert sum(outcome is None for outcome in outcomes) <= 3
    assert all(outcome is None or isinstance(outcome, TooManySessions) for outcome in outcomes)


async def test_a_place_is_free_again_after_the_idle_time(client: redis.asyncio.Redis, tenant: str) -> None:
    """A session whose driver died keeps its place no longer than an idle session lives."""
    store = RedisStore(client, idle_s=1)
    for session_id in ids(3):
        await store.open(session_id, opened(tenant=tenant))
    with pytest.raises(TooManySessions):
        await store.open(uuid4().hex, opened(tenant=tenant))
    await asyncio.sleep(1.1)
    await store.open(uuid4().hex, opened(tenant=tenant))
    assert await client.zcard(keys.tenant(tenant)) == 1
    assert await client.ttl(keys.tenant(tenant)) >= 0
