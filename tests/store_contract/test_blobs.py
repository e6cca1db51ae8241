"""Routing replay rows beside the stream: with their event or not at all, and for as long as the session."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from tests.store_contract.conftest import MakeStore
from tests.support.proxy import BreakingProxy
from tests.support.sessions import opened, plain, sealed, turn
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import SessionDeleted, SessionNotFound, StoreUnavailable, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SEALED_ID, Blob, TurnRecorded
from tokentape_core.store import RedisStore, SeqTaken, Store, connect

EXPERTS, INDEXER = "routed_experts", "indexer_topk"
PART_BYTES = 1000
IDLE_S = 1000
RETENTION_S = 5000
WRITERS = 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a length at which a test needs no megabytes."""
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", PART_BYTES)


def _data(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def _turn(blobs: dict[str, bytes], **given: Any) -> TurnRecorded:
    """A turn that refers to these blobs, one row to the byte."""
    replay = {
        kind: Blob(
            start=0,
            rows=len(data),
            layers=1,
            topk=1,
            dtype="u1",
            stored=((0, len(data)),) if data else (),
            parts=-(-len(data) // limits.STORE_VALUE_BYTES),
        )
        for kind, data in blobs.items()
    }
    return turn(replay=replay, **given)


async def _append(store: Store, session_id: str, seq: int, **blobs: bytes) -> TurnRecorded:
    event = _turn(blobs)
    await store.append(session_id, seq, event, blobs)
    return event


async def _read(store: Store, session_id: str, seq: int) -> dict[str, bytes]:
    """All blobs of a turn, found by what the stream itself says of them."""
    [(_, event)] = await store.read(
        session_id, after=OPENED_ID if seq == 1 else f"{seq - 1}-0", until=f"{seq}-0"
    )
    assert isinstance(event, TurnRecorded)
    found = await store.read_blobs(session_id, [(event, kind) for kind in event.replay])
    assert set(found) == {(event.id, kind) for kind in event.replay}
    return {kind: data for (_, kind), data in found.items()}


# What every store promises


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 2001, 33_333])
async def test_bytes_come_back(store: Store, session_id: str, size: int) -> None:
    """Of whatever length, also of none, a blob is read as it was written."""
    await store.open(session_id, opened())
    await _append(store, session_id, 1, routed_experts=_data(size))
    assert await _read(store, session_id, 1) == {EXPERTS: _data(size)}


async def test_any_byte_is_carried(store: Store, session_id: str) -> None:
    """Nothing in the bytes has a meaning to the store."""
    data = bytes(range(256)) * 10 + b"\r\n$-1\r\n" * 300
    await store.open(session_id, opened())
    await _append(store, session_id, 1, routed_experts=data)
    assert await _read(store, session_id, 1) == {EXPERTS: data}


async def test_kinds_do_not_mix(store: Store, session_id: str) -> None:
    """Each kind of a turn has its own bytes, one of them with none."""
    await store.open(session_id, opened())
    await _append(store, session_id, 1, routed_experts=_data(2500), indexer_topk=_data(1500, 1))
    await _append(store, session_id, 2, routed_experts=b"", indexer_topk=_data(3, 2))
    assert await _read(store, session_id, 1) == {EXPERTS: _data(2500), INDEXER: _data(1500, 1)}
    assert await _read(store, session_id, 2) == {EXPERTS: b"", INDEXER: _data(3, 2)}


async def test_turns_and_sessions_do_not_mix(store: Store, session_id: str) -> None:
    """Many blobs are read at once, each under its event and kind; another session's are not among them."""
    sizes = {1: 100, 2: 0, 3: 20_500, 4: 1000}
    await store.open(session_id, opened())
    await store.open(session_id + "x", opened())
    events = [await _append(store, session_id, s, routed_experts=_data(n)) for s, n in sizes.items()]
    other = await _append(store, session_id + "x", 1, routed_experts=_data(7))
    found = await store.read_blobs(session_id, [(event, EXPERTS) for event in reversed(events)])
    assert found == {(e.id, EXPERTS): _data(n) for e, n in zip(events, sizes.values(), strict=True)}
    assert await store.read_blobs(session_id, []) == {}
    with pytest.raises(StreamCorrupt):
        await store.read_blobs(session_id, [(events[0], EXPERTS), (other, EXPERTS)])


async def test_the_event_comes_back_with_its_references(store: Store, session_id: str) -> None:
    """What the stream says of the blobs is what was written."""
    await store.open(session_id, opened())
    event = await _append(store, session_id, 1, routed_experts=_data(2500), indexer_topk=b"")
    [(_, read)] = await store.read(session_id, after=OPENED_ID)
    assert plain(read) == plain(event)
    assert isinstance(read, TurnRecorded)
    assert (read.replay[EXPERTS].parts, read.replay[INDEXER].parts) == (3, 0)


async def test_the_same_append_again_is_success(store: Store, session_id: str) -> None:
    """Repeated at once, after later turns and after the seal, it leaves one entry and its bytes."""
    blobs = {EXPERTS: _data(2500)}
    event = _turn(blobs)
    await store.open(session_id, opened())
    for _ in range(2):
        await store.append(session_id, 1, event, blobs)
    await _append(store, session_id, 2, routed_experts=_data(10, 2))
    await store.append(session_id, 1, event, blobs)
    await store.seal(session_id, sealed())
    await store.append(session_id, 1, event, blobs)
    ids = [entry_id for entry_id, _ in await store.read(session_id)]
    assert ids == [OPENED_ID, "1-0", "2-0", SEALED_ID]
    assert await _read(store, session_id, 1) == blobs
    assert await _read(store, session_id, 2) == {EXPERTS: _data(10, 2)}


async def test_a_refused_turn_keeps_its_blobs_for_the_next_seq(store: Store, session_id: str) -> None:
    """A taken seq adds no entry and changes no bytes of the winner; under the next seq all is there."""
    await store.open(session_id, opened())
    winner = {EXPERTS: _data(1500, 1)}
    await _append(store, session_id, 1, **winner)
    blobs = {EXPERTS: _data(1500, 2), INDEXER: _data(5)}
    loser = _turn(blobs)
    with pytest.raises(SeqTaken):
        await store.append(session_id, 1, loser, blobs)
    assert await store.tail(session_id) == "1-0"
    assert await _read(store, session_id, 1) == winner
    await store.append(session_id, 2, loser, blobs)
    assert await _read(store, session_id, 1) == winner
    assert await _read(store, session_id, 2) == blobs


async def test_a_sealed_session_takes_no_turn_with_blobs(store: Store, session_id: str) -> None:
    """After the seal nothing is added, and what was there before can be read."""
    await store.open(session_id, opened())
    await _append(store, session_id, 1, routed_experts=_data(1500))
    await store.seal(session_id, sealed())
    with pytest.raises(SessionDeleted):
        await _append(store, session_id, 2, routed_experts=_data(1500, 2))
    assert [entry_id for entry_id, _ in await store.read(session_id)] == [OPENED_ID, "1-0", SEALED_ID]
    assert await _read(store, session_id, 1) == {EXPERTS: _data(1500)}


async def test_an_unknown_session_takes_no_turn_with_blobs(store: Store, session_id: str) -> None:
    """It does not come to be by its blobs, and once opened it takes the same event."""
    blobs = {EXPERTS: _data(1500)}
    event = _turn(blobs)
    with pytest.raises(SessionNotFound):
        await store.append(session_id, 1, event, blobs)
    assert (await store.tail(session_id), await store.read(session_id)) == (None, [])
    await store.open(session_id, opened())
    await store.append(session_id, 1, event, blobs)
    assert await _read(store, session_id, 1) == blobs


async def test_blobs_that_were_never_written_are_gone(store: Store, session_id: str) -> None:
    """An event that refers to bytes which nobody has is corrupt, in a known session and in an unknown one."""
    await store.open(session_id, opened())
    event = _turn({EXPERTS: b"123"})
    await store.append(session_id, 1, event)
    for sid in (session_id, session_id + "x"):
        with pytest.raises(StreamCorrupt, match=r"gone"):
            await store.read_blobs(sid, [(event, EXPERTS)])


async def test_blobs_are_shared_by_processes(make_store: MakeStore, session_id: str) -> None:
    """What one process wrote another reads (INV-4)."""
    one, two = make_store(), make_store()
    await one.open(session_id, opened())
    await _append(one, session_id, 1, routed_experts=_data(2500))
    assert await _read(two, session_id, 1) == {EXPERTS: _data(2500)}


async def test_racing_writers_keep_their_own_bytes(make_store: MakeStore, session_id: str) -> None:
    """Writers that lose a seq append under the next: every turn that is stored has exactly its bytes."""

    async def write(store: Store, number: int) -> None:
        for n in range(4):
            blobs = {EXPERTS: _data(1200, 10 * number + n), INDEXER: _data(n, number)}
            event = _turn(blobs, response_id=f"{10 * number + n}")
            seq = 1
            while True:
                try:
                    await store.append(session_id, seq, event, blobs)
                    break
                except SeqTaken:
                    seq += 1

    stores = [make_store() for _ in range(WRITERS)]
    await stores[0].open(session_id, opened())
    async with asyncio.timeout(30):
        await asyncio.gather(*(write(store, number) for number, store in enumerate(stores)))
    turns = [event for _, event in await stores[0].read(session_id, after=OPENED_ID)]
    assert len(turns) == WRITERS * 4
    for seq, event in enumerate(turns, 1):
        assert isinstance(event, TurnRecorded)
        number, n = divmod(int(event.response_id), 10)
        expected = {EXPERTS: _data(1200, 10 * number + n), INDEXER: _data(n, number)}
        assert await _read(stores[0], session_id, seq) == expected


# What the Redis store promises beyond the port


@pytest.fixture
def redis_store(client: redis.asyncio.Redis) -> RedisStore:
    return RedisStore(client, idle_s=IDLE_S, retention_s=RETENTION_S)


async def _ttls(client: redis.asyncio.Redis, session_id: str) -> tuple[int, int]:
    """Seconds that stream and blobs have left, rounded up as a second may have passed; -2 without a key."""
    ttls = [await client.ttl(key(session_id)) for key in (keys.events, keys.blobs)]
    stream, blobs = (ttl + (1 if ttl % 100 == 99 else 0) for ttl in ttls)
    return stream, blobs


async def _hash(client: redis.asyncio.Redis, session_id: str) -> dict[str, bytes]:
    found: dict[bytes, bytes] = await client.hgetall(keys.blobs(session_id))  # type: ignore[misc]
    return {name.decode(): data for name, data in found.items()}


async def test_no_value_is_longer_than_its_bound(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str
) -> None:
    """A blob is cut into full parts and a last one, under the names that the contract gives."""
    await redis_store.open(session_id, opened())
    event = await _append(redis_store, session_id, 1, routed_experts=_data(2500), indexer_topk=_data(1000))
    assert await _hash(client, session_id) == {
        keys.blob_part(event.id, EXPERTS, 0): _data(2500)[:1000],
        keys.blob_part(event.id, EXPERTS, 1): _data(2500)[1000:2000],
        keys.blob_part(event.id, EXPERTS, 2): _data(2500)[2000:],
        keys.blob_part(event.id, INDEXER, 0): _data(1000),
    }


async def test_a_repeated_append_leaves_one_copy(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str
) -> None:
    """However often it is sent and refused, the hash holds each part once."""
    blobs = {EXPERTS: _data(2500)}
    event = _turn(blobs)
    await redis_store.open(session_id, opened())
    await redis_store.append(session_id, 1, turn())
    for _ in range(2):
        with pytest.raises(SeqTaken):
            await redis_store.append(session_id, 1, event, blobs)
    for _ in range(2):
        await redis_store.append(session_id, 2, event, blobs)
    assert set(await _hash(client, session_id)) == {keys.blob_part(event.id, EXPERTS, n) for n in range(3)}


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_part_that_is_gone_is_corrupt(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str, gone: int
) -> None:
    """The first part, one in the middle or the last: bytes with a hole are not read, the part is named."""
    await redis_store.open(session_id, opened())
    event = await _append(redis_store, session_id, 1, routed_experts=_data(2500))
    name = keys.blob_part(event.id, EXPERTS, gone)
    await client.hdel(keys.blobs(session_id), name)  # type: ignore[misc]
    with pytest.raises(StreamCorrupt, match=f"gone: {name}"):
        await _read(redis_store, session_id, 1)


async def test_a_hash_that_is_gone_is_corrupt(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str
) -> None:
    """If all blobs are gone only those without bytes can be read."""
    await redis_store.open(session_id, opened())
    await _append(redis_store, session_id, 1, routed_experts=_data(20_500))
    await _append(redis_store, session_id, 2, routed_experts=b"")
    await client.delete(keys.blobs(session_id))
    with pytest.raises(StreamCorrupt, match="and 20 others"):
        await _read(redis_store, session_id, 1)
    assert await _read(redis_store, session_id, 2) == {EXPERTS: b""}


async def test_without_blobs_there_is_no_hash(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str
) -> None:
    """A session of a model without routing replay rows has one key."""
    await redis_store.open(session_id, opened())
    await redis_store.append(session_id, 1, turn())
    await _append(redis_store, session_id, 2, routed_experts=b"")
    assert await _ttls(client, session_id) == (IDLE_S, -2)
    await redis_store.seal(session_id, sealed())
    assert await _ttls(client, session_id) == (RETENTION_S, -2)


async def test_blobs_expire_with_the_session(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str
) -> None:
    """From the first blob on the hash has an end, that of the stream, whenever in the session it comes."""
    await redis_store.open(session_id, opened())
    await redis_store.append(session_id, 1, turn())
    await _append(redis_store, session_id, 2, routed_experts=_data(10))
    assert await _ttls(client, session_id) == (IDLE_S, IDLE_S)


@pytest.mark.parametrize("later", [{}, {EXPERTS: b""}, {EXPERTS: b"123"}], ids=["none", "empty", "some"])
async def test_every_turn_puts_the_end_of_the_blobs_off(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str, later: dict[str, bytes]
) -> None:
    """A later turn begins the idle time anew, with blobs of its own or without."""
    await redis_store.open(session_id, opened())
    await _append(redis_store, session_id, 1, routed_experts=_data(10))
    for key in (keys.events(session_id), keys.blobs(session_id)):
        await client.expire(key, 50)
    await _append(redis_store, session_id, 2, **later)
    assert await _ttls(client, session_id) == (IDLE_S, IDLE_S)


@pytest.mark.parametrize("retention_s", [RETENTION_S, 100])
async def test_a_seal_begins_the_retention_of_the_blobs(
    client: redis.asyncio.Redis, session_id: str, retention_s: int
) -> None:
    """Blobs stay as long as the sealed stream, whether that is longer or shorter than the idle time."""
    store = RedisStore(client, idle_s=IDLE_S, retention_s=retention_s)
    await store.open(session_id, opened())
    await _append(store, session_id, 1, routed_experts=_data(10))
    await store.seal(session_id, sealed())
    assert await _ttls(client, session_id) == (retention_s, retention_s)


async def test_a_late_turn_does_not_shorten_the_retention_of_the_blobs(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str
) -> None:
    """A turn after the seal is refused, one's own is repeated: the blobs stay as long as before."""
    blobs = {EXPERTS: _data(10)}
    mine = _turn(blobs)
    await redis_store.open(session_id, opened())
    await redis_store.append(session_id, 1, mine, blobs)
    await redis_store.seal(session_id, sealed())
    for late in (blobs, {}):
        with pytest.raises(SessionDeleted):
            await _append(redis_store, session_id, 2, **late)
    await redis_store.append(session_id, 1, mine, blobs)
    assert await _ttls(client, session_id) == (RETENTION_S, RETENTION_S)


@pytest.mark.parametrize("state", ["unknown", "sealed without blobs", "seq taken"])
async def test_blobs_of_a_refused_turn_expire(
    client: redis.asyncio.Redis, redis_store: RedisStore, session_id: str, state: str
) -> None:
    """What a refused append left behind has an end of its own, also where the session had no blobs before."""
    if state != "unknown":
        await redis_store.open(session_id, opened())
    if state == "sealed without blobs":
        await redis_store.seal(session_id, sealed())
    if state == "seq taken":
        await redis_store.append(session_id, 1, turn())
    with pytest.raises((SessionNotFound, SessionDeleted, SeqTaken)):
        await _append(redis_store, session_id, 1, routed_experts=_data(10))
    stream, blobs = await _ttls(client, session_id)
    assert (stream == -2) is (state == "unknown")
    assert blobs in (-2, IDLE_S)


# Faults, on a real server


@pytest.fixture
async def direct(server: EmbeddedValkey) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def proxy(server: EmbeddedValkey) -> AsyncIterator[BreakingProxy]:
    async with BreakingProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def behind_proxy(server: EmbeddedValkey, proxy: BreakingProxy) -> AsyncIterator[RedisStore]:
    """A store whose connections can be broken; it is connected already."""
    client = connect(server.url.replace(f":{server.port}/", f":{proxy.port}/"))
    store = RedisStore(client)
    await store.ready()
    yield store
    await client.aclose()


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(5):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_a_lost_reply_stores_event_and_blobs_once(
    direct: redis.asyncio.Redis, proxy: BreakingProxy, behind_proxy: RedisStore, session_id: str
) -> None:
    """The connection breaks after the transaction was done: the next attempt finds it there already."""
    store = RedisStore(direct)
    await store.open(session_id, opened())
    blobs = {EXPERTS: _data(2500), INDEXER: _data(10)}
    event = _turn(blobs)
    proxy.break_after(b"EXEC")
    proxy.may_break.clear()
    appending = asyncio.create_task(behind_proxy.append(session_id, 1, event, blobs))

    async def is_done() -> bool:
        return await store.tail(session_id) == "1-0"

    await _until(is_done)
    assert not appending.done()
    before = await _hash(direct, session_id)
    assert len(before) == 4
    proxy.may_break.set()
    await appending
    assert proxy.connections >= 2
    assert await _hash(direct, session_id) == before
    assert len(await store.read(session_id)) == 2
    assert await _read(store, session_id, 1) == blobs


@pytest.mark.parametrize("rival", ["a turn", "the seal"])
async def test_a_lost_reply_and_then_another_writer(
    direct: redis.asyncio.Redis, proxy: BreakingProxy, behind_proxy: RedisStore, session_id: str, rival: str
) -> None:
    """What happens between the lost reply and the next attempt changes nothing: event and blobs are in."""
    store = RedisStore(direct)
    await store.open(session_id, opened())
    blobs = {EXPERTS: _data(2500)}
    proxy.break_after(b"EXEC")
    proxy.may_break.clear()
    appending = asyncio.create_task(behind_proxy.append(session_id, 1, _turn(blobs), blobs))

    async def is_done() -> bool:
        return await store.tail(session_id) == "1-0"

    await _until(is_done)
    if rival == "a turn":
        await _append(store, session_id, 2, routed_experts=_data(7))
    else:
        await store.seal(session_id, sealed())
    proxy.may_break.set()
    await appending
    assert await _read(store, session_id, 1) == blobs
    assert len(await store.read(session_id)) == 3


async def test_a_transaction_that_breaks_off_stores_nothing(
    direct: redis.asyncio.Redis,
    proxy: BreakingProxy,
    behind_proxy: RedisStore,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the connection breaks before its end, neither event nor blobs are there until it is sent again."""
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", 300_000)
    store = RedisStore(direct)
    await store.open(session_id, opened())
    blobs = {EXPERTS: _data(2_000_000)}
    event = _turn(blobs)
    proxy.break_after(b"XADD")  # the blobs are still on their way when it is forwarded
    proxy.may_break.clear()
    appending = asyncio.create_task(behind_proxy.append(session_id, 1, event, blobs))
    await proxy.executed.wait()
    assert await store.tail(session_id) == OPENED_ID
    assert await _hash(direct, session_id) == {}
    proxy.may_break.set()
    await appending
    assert len(await store.read(session_id)) == 2
    assert len(await _hash(direct, session_id)) == 7
    assert await _read(store, session_id, 1) == blobs


REFUSALS: dict[str, tuple[tuple[str, str], tuple[str, str], str]] = {
    "out of memory": (("maxmemory", "1"), ("maxmemory", "0"), "maxmemory"),
    "too few replicas": (("min-replicas-to-write", "1"), ("min-replicas-to-write", "0"), "replicas"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_server_that_refuses_writes_stores_nothing(
    direct: redis.asyncio.Redis, session_id: str, refusal: str
) -> None:
    """Refused writes are `store_unavailable` and leave nothing; afterwards the same append succeeds."""
    begin, end, reason = REFUSALS[refusal]
    store = RedisStore(direct)
    await store.open(session_id, opened())
    blobs = {EXPERTS: _data(2500)}
    event = _turn(blobs)
    await direct.config_set(*begin)
    with pytest.raises(StoreUnavailable, match=f"Redis refuses the command: .*{reason}"):
        await store.append(session_id, 1, event, blobs)
    assert await store.tail(session_id) == OPENED_ID
    assert await _hash(direct, session_id) == {}
    await direct.config_set(*end)
    await store.append(session_id, 1, event, blobs)
    assert await _read(store, session_id, 1) == blobs


async def test_a_server_that_is_gone_gives_no_blobs(
    server: EmbeddedValkey, direct: redis.asyncio.Redis, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is `store_unavailable`, not corrupt: the bytes may be there when it is over."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.4)
    store = RedisStore(direct)
    await store.open(session_id, opened())
    event = await _append(store, session_id, 1, routed_experts=_data(2500))
    await asyncio.to_thread(server.stop)
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await store.read_blobs(session_id, [(event, EXPERTS)])
    await asyncio.to_thread(server.start)
    assert await _read(store, session_id, 1) == {EXPERTS: _data(2500)}


async def test_a_cancelled_append_can_be_repeated(direct: redis.asyncio.Redis, session_id: str) -> None:
    """A request may be cancelled at any moment: repeated, its turn is there once and with its own bytes."""
    seed = 11
    print("seed", seed)
    randomness = random.Random(seed)
    store = RedisStore(direct)
    await store.open(session_id, opened())
    for seq in range(1, 21):
        blobs = {EXPERTS: _data(1500, seq)}
        event = _turn(blobs)
        task = asyncio.create_task(store.append(session_id, seq, event, blobs))
        for _ in range(randomness.randrange(8)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.append(session_id, seq, event, blobs)
        assert await _read(store, session_id, seq) == blobs
    assert len(await _hash(direct, session_id)) == 40
