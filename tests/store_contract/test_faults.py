"""The Redis store on a real server that refuses, breaks off, restarts or is not there."""

import asyncio
import os
import random
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from tests.support.proxy import BreakingProxy
from tests.support.sessions import opened, sealed, turn
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import SessionNotFound, StoreUnavailable
from tokentape_contracts.events import OPENED_ID, SEALED_ID
from tokentape_core.domain.state import fold
from tokentape_core.store import RedisStore, connect, redis_errors

BOUND_S = 5.0
"""Far above the shortened retry time of these tests, far below what a bug would take."""


@pytest.fixture
async def client(server: EmbeddedValkey) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
def store(client: redis.asyncio.Redis) -> RedisStore:
    return RedisStore(client)


@pytest.fixture
def short_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.4)


def _commands(store: RedisStore, session_id: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every command of the port, on a session that has one turn."""
    return {
        "open": lambda: store.open(session_id + "x", opened()),
        "append": lambda: store.append(session_id, 2, turn()),
        "seal": lambda: store.seal(session_id, sealed()),
        "read": lambda: store.read(session_id),
        "tail": lambda: store.tail(session_id),
        "ready": store.ready,
    }


SECRET = "what the agent said"


def _logged(error: BaseException) -> str:
    """What a log shows of an error with its traceback."""
    return "".join(traceback.format_exception(error))


WRITES = ("open", "append", "seal")
COMMANDS = (*WRITES, "read", "tail", "ready")

REFUSALS: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, ...]], str]] = {
    "out of memory": (
        [("CONFIG", "SET", "maxmemory", "1")],
        [("CONFIG", "SET", "maxmemory", "0")],
        "maxmemory",
    ),
    "too few replicas": (
        [("CONFIG", "SET", "min-replicas-to-write", "1")],
        [("CONFIG", "SET", "min-replicas-to-write", "0")],
        "replicas",
    ),
    "a read-only replica": ([("REPLICAOF", "127.0.0.1", "1")], [("REPLICAOF", "NO", "ONE")], "read only"),
}


@pytest.mark.parametrize("command", WRITES)
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_server_that_refuses_writes_is_unavailable(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str, refusal: str, command: str
) -> None:
    """Refused writes are `store_unavailable` with the server's reason; afterwards the same write succeeds."""
    begin, end, reason = REFUSALS[refusal]
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    write = _commands(store, session_id)[command]
    for args in begin:
        await client.execute_command(*args)
    with pytest.raises(StoreUnavailable, match=f"Redis refuses the command: .*{reason}"):
        await write()
    for args in end:
        await client.execute_command(*args)
    await write()


async def test_an_error_does_not_show_the_conversation(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """Detail and traceback hold the server's reason, not the refused command, whatever is in that."""
    await store.open(session_id, opened())
    await client.config_set("min-replicas-to-write", 1)
    said = {"role": "user", "content": f"{SECRET} of pipeline caused error: ('MISCONF"}
    with pytest.raises(StoreUnavailable) as caught:
        await store.append(session_id, 1, turn(messages=[said]), {"routed_experts": b"rows"})
    assert caught.value.detail == "Redis refuses the command: NOREPLICAS Not enough good replicas to write."
    assert SECRET not in _logged(caught.value)


async def test_a_defect_does_not_show_the_conversation(client: redis.asyncio.Redis, session_id: str) -> None:
    """What nobody foresaw is logged with its traceback: the lines of code are there, what was sent is not."""
    key = keys.events(session_id)
    await client.set(key, b"")
    pipe = client.pipeline(transaction=True)
    pipe.xadd(key, {"messages": f"{SECRET} of pipeline caused error: ('MISCONF"})
    with pytest.raises(ResponseError, match=r"^WRONGTYPE ") as caught, redis_errors():
        await pipe.execute()
    assert SECRET not in _logged(caught.value)
    assert "await pipe.execute()" in _logged(caught.value)


async def test_a_server_that_quotes_a_command(client: redis.asyncio.Redis) -> None:
    """Redis quotes the arguments of a command that it does not have; we do not, alone or in a transaction."""
    pipe = client.pipeline(transaction=True)
    pipe.execute_command("XADDED", "key", SECRET)
    with pytest.raises(ResponseError) as queued, redis_errors():
        await pipe.execute()
    with pytest.raises(ResponseError) as alone, redis_errors():
        await client.execute_command("XADDED", "key", SECRET)
    for caught in (queued, alone):
        assert str(caught.value) == "unknown command 'XADDED'"
        assert SECRET not in _logged(caught.value)


def test_a_lost_connection_does_not_show_the_conversation() -> None:
    """Where a transaction met a slot of a cluster that moves, the command stands amid the text."""
    quoted = f"Command # 1 (XADD key {SECRET}) of pipeline caused error: ('TRYAGAIN Multiple keys',)"
    with pytest.raises(StoreUnavailable) as caught, redis_errors():
        raise RedisConnectionError(f"the slot 1 is not settled: {quoted}") from ResponseError(quoted)
    assert caught.value.detail == "Redis cannot be reached: the slot 1 is not settled: TRYAGAIN Multiple keys"
    assert SECRET not in _logged(caught.value)


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("open", "xadd"),
        ("append", "xadd"),
        ("seal", "zadd"),
        ("read", "xrange"),
        ("tail", "xrevrange"),
        ("ready", "expire"),
    ],
)
async def test_a_right_that_is_missing(
    server: EmbeddedValkey,
    client: redis.asyncio.Redis,
    store: RedisStore,
    session_id: str,
    command: str,
    right: str,
) -> None:
    """A user without it is the operator's to mend: unavailable, with the right; in a transaction too."""
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    await client.execute_command("ACL", "SETUSER", "some", "on", ">word", "~*", "+@all", f"-{right}")
    limited = connect(f"redis://some:word@127.0.0.1:{server.port}/0")
    reason = f"^Redis refuses the command: NOPERM User some has no permissions to run the '{right}' command$"
    with pytest.raises(StoreUnavailable, match=reason):
        await _commands(RedisStore(limited), session_id)[command]()
    await limited.aclose()


async def test_a_reading_process_survives_refused_writes(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """While writes are refused, sessions can still be read."""
    await store.open(session_id, opened())
    await client.config_set("maxmemory", 1)
    assert await store.tail(session_id) == OPENED_ID
    assert len(await store.read(session_id)) == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("warm", [False, True], ids=["never connected", "connected before"])
async def test_a_server_that_is_gone_is_unavailable_in_time(
    server: EmbeddedValkey, store: RedisStore, session_id: str, short_retry: None, warm: bool, command: str
) -> None:
    """A refused connection is tried again for the retry time, then it is `store_unavailable`."""
    if warm:
        await store.ready()
    server.stop()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await _commands(store, session_id)[command]()


async def test_many_commands_wait_for_a_server_side_by_side(
    server: EmbeddedValkey, store: RedisStore, session_id: str, short_retry: None
) -> None:
    """Commands do not queue up for their turn to find out: all fail within the one bound."""
    server.stop()
    async with asyncio.timeout(BOUND_S):
        outcomes = await asyncio.gather(*(store.tail(session_id) for _ in range(50)), return_exceptions=True)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)


async def test_a_silent_server_is_unavailable_in_time(server: EmbeddedValkey, short_retry: None) -> None:
    """A server that holds the connection and says nothing costs the retry time and one socket timeout."""
    client = connect(server.url, timeout_s=0.2)
    store = RedisStore(client)
    await store.ready()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.ready()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await store.ready()
    await client.aclose()


@pytest.mark.parametrize(
    ("userinfo", "reason"),
    [
        (":wrong@", "invalid username-password pair or user is disabled"),
        ("nobody:wrong@", "invalid username-password pair or user is disabled"),
        ("", "Authentication required"),
    ],
    ids=["wrong password", "unknown user", "no password"],
)
async def test_a_wrong_password_is_not_tried_again(
    server: EmbeddedValkey, userinfo: str, reason: str
) -> None:
    """What waiting cannot mend fails at once, long before the retry time is over, and says what is wrong."""
    client = connect(f"redis://{userinfo}127.0.0.1:{server.port}/0")
    async with asyncio.timeout(limits.STORE_RETRY_S / 2):
        with pytest.raises(StoreUnavailable, match=f"^Redis refuses the login: {reason}"):
            await RedisStore(client).ready()
    await client.aclose()


async def test_a_command_waits_for_a_server_that_comes_back(
    server: EmbeddedValkey, store: RedisStore, session_id: str
) -> None:
    """A command that is sent while the server is down succeeds when it is up again, exactly once."""
    await store.open(session_id, opened())
    await asyncio.to_thread(server.stop)
    waiting = asyncio.create_task(store.append(session_id, 1, turn()))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await asyncio.to_thread(server.start)
    await waiting
    assert len(await store.read(session_id)) == 2


async def test_a_session_survives_restarts_of_the_server(
    server: EmbeddedValkey, store: RedisStore, session_id: str
) -> None:
    """With an append-only file every entry is there after a restart, and the seal still seals."""
    await store.open(session_id, opened())
    for seq in range(1, 4):
        await store.append(session_id, seq, turn())
        await asyncio.to_thread(server.restart)
    await store.seal(session_id, sealed())
    await asyncio.to_thread(server.restart)
    with pytest.raises(Exception, match="deleted"):
        await store.append(session_id, 4, turn())
    assert [entry_id for entry_id, _ in await store.read(session_id)] == [
        *(OPENED_ID, "1-0", "2-0", "3-0", SEALED_ID)
    ]


async def test_without_persistence_a_restart_is_noticed(session_id: str) -> None:
    """A server that lost its data knows no session: an append makes no new stream."""
    with EmbeddedValkey() as server:
        client = connect(server.url)
        store = RedisStore(client)
        await store.open(session_id, opened())
        await asyncio.to_thread(server.restart)
        with pytest.raises(SessionNotFound):
            await store.append(session_id, 1, turn())
        await client.aclose()


@pytest.mark.parametrize("command", WRITES)
async def test_a_reply_that_is_lost_is_looked_up(
    server: EmbeddedValkey, store: RedisStore, session_id: str, command: str
) -> None:
    """The connection breaks after the server has executed the XADD: the write is in the stream once."""
    await store.open(session_id, opened())
    await store.append(session_id, 1, turn())
    async with BreakingProxy(server.port) as proxy:
        client = connect(server.url.replace(f":{server.port}/", f":{proxy.port}/"))
        behind_proxy = RedisStore(client)
        await behind_proxy.ready()
        proxy.break_after(b"XADD")
        await _commands(behind_proxy, session_id)[command]()
        await client.aclose()
    assert proxy.executed.is_set()
    assert proxy.connections >= 2
    expected = {
        "open": (session_id + "x", [OPENED_ID]),
        "append": (session_id, [OPENED_ID, "1-0", "2-0"]),
        "seal": (session_id, [OPENED_ID, "1-0", SEALED_ID]),
    }
    stream, ids = expected[command]
    assert [entry_id for entry_id, _ in await store.read(stream)] == ids


async def test_a_reply_that_is_lost_before_the_seal_is_still_success(
    server: EmbeddedValkey, store: RedisStore, session_id: str
) -> None:
    """The session is sealed between the lost reply and the next attempt: the turn is in it, and counts."""
    await store.open(session_id, opened())
    async with BreakingProxy(server.port) as proxy:
        client = connect(server.url.replace(f":{server.port}/", f":{proxy.port}/"))
        writer = RedisStore(client)
        await writer.ready()
        proxy.break_after(b"XADD")
        proxy.may_break.clear()
        writing = asyncio.create_task(writer.append(session_id, 1, turn()))
        await proxy.executed.wait()
        await store.seal(session_id, sealed())
        proxy.may_break.set()
        await writing
        await client.aclose()
    assert [entry_id for entry_id, _ in await store.read(session_id)] == [OPENED_ID, "1-0", SEALED_ID]


async def test_a_cancelled_append_leaves_the_client_in_order(
    client: redis.asyncio.Redis, store: RedisStore, session_id: str
) -> None:
    """A request may be cancelled at any moment: its append can be repeated, and replies are not mixed up."""
    seed = 7
    print("seed", seed)
    randomness = random.Random(seed)
    await store.open(session_id, opened())
    for seq in range(1, 31):
        event = turn(suffix=[seq])
        task = asyncio.create_task(store.append(session_id, seq, event))
        for _ in range(randomness.randrange(8)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.append(session_id, seq, event)
        assert await store.tail(session_id) == f"{seq}-0"
    state = fold(await store.read(session_id))
    assert state is not None
    assert [t.event.suffix.tolist() for t in state.turns] == [[seq] for seq in range(1, 31)]
