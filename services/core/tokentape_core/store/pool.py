"""Connections to one server: tried until a deadline, and none to one that has become a replica."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tokentape_contracts import limits

LOST: Final = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a server that is away, or on its way, raises; the command is sent again."""

_BACKOFF_CAP_S: Final = 0.5
_BACKOFF_BASE_S: Final = 0.02
SOCKET_TIMEOUT_S: Final = 5.0
_WAIT_MS: Final = 1_000
_SENT_AT_ONCE: Final = 32 * 1024
"""Bytes that an idle connection takes without a wait: half of what asyncio and uvloop buffer."""
_UVLOOP_CLOSED: Final = "the handler is closed"

T = TypeVar("T")

_trying: ContextVar[bool] = ContextVar("tokentape_store_trying", default=False)


class UntilDeadline(Retry):
    """Tries again until `limits.STORE_RETRY_S` have passed.

    Not a number of times: a refused connection fails at once, a silent server only after a socket timeout,
    which the last attempt may add to the deadline. A reconnect within a command is an attempt of the command,
    not a loop of its own.
    """

    def __init__(self) -> None:
        super().__init__(ExponentialBackoff(cap=_BACKOFF_CAP_S, base=_BACKOFF_BASE_S), -1)

    async def call_with_retry(self, do: Callable[[], Awaitable[T]], fail: Callable[[RedisError], Any]) -> T:
        if _trying.get():
            return await do()
        token = _trying.set(True)
        deadline = time.monotonic() + limits.STORE_RETRY_S
        failures = 0
        try:
            while True:
                try:
                    return await do()
                except LOST as error:
                    await fail(error)  # type: ignore[arg-type]
                    failures += 1
                    pause_s = self._backoff.compute(failures)
                    if isinstance(error, AuthenticationError) or time.monotonic() + pause_s > deadline:
                        raise
                    await asyncio.sleep(pause_s)
        finally:
            _trying.reset(token)


class Pool(redis.asyncio.BlockingConnectionPool):
    """Connections that are tried until the deadline, and none to a server that has become a replica.

    redis-py tries a refused connection again, but not one that breaks off while it is set up, as it does
    where a server is just ending, or where a balancer has no server behind it. And it keeps connections to a
    primary that was demoted: where an address has moved to another server, writes would be refused for ever.

    Args:
        timeout_s: the wait for a reply; None for ever.
        connection_kwargs: what redis-py makes of a URL.

    Attributes:
        demotions: how often a server refused a write as it is a replica. A connection from before the last
            time is made anew before it is used again.
    """

    demotions = 0
    _waiting = 0
    """Who wants a connection while there may be none."""

    def __init__(self, timeout_s: float | None, connection_class: Any = Connection, **kwargs: Any) -> None:
        given: dict[str, Any] = {
            "max_connections": limits.STORE_CONNECTIONS,
            "timeout": limits.STORE_RETRY_S,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": SOCKET_TIMEOUT_S,
            **({} if "path" in kwargs else {"socket_keepalive": True}),
            "health_check_interval": 30,
            "retry": UntilDeadline(),
            "retry_on_error": [RedisConnectionError, RedisTimeoutError, BusyLoadingError],
        }
        super().__init__(connection_class=_noticing(connection_class, self), **{**given, **kwargs})

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        idle: Any = self._available_connections[-1] if self._available_connections else None
        if idle is not None and idle.is_connected and idle.demotions == self.demotions:
            # No lock, timer or retry where nothing can fail.
            return self.get_available_connection()  # type: ignore[no-untyped-call]

        async def do() -> Any:
            connection: Any = await super(Pool, self).get_connection(*args, **kwargs)
            if connection.demotions != self.demotions:
                try:
                    await connection.disconnect()
                    await connection.connect()
                except BaseException:
                    await self.release(connection)
                    raise
                connection.demotions = self.demotions
            return connection

        async def fail(_: RedisError) -> None: ...

        self._waiting += 1
        try:
            return await self.connection_kwargs["retry"].call_with_retry(do, fail)
        finally:
            self._waiting -= 1

    async def release(self, connection: Any) -> None:
        if self._waiting:
            await super().release(connection)
        else:  # no lock where nobody waits
            await super(redis.asyncio.BlockingConnectionPool, self).release(connection)

    async def ensure_connection(self, connection: Any) -> None:
        """Connects, and does not look whether unread data waits, which would cost as much as a command.

        A command that is given up in the middle closes its connection, and one that meets a closed connection
        is tried again.
        """
        await connection.connect()


def _noticing(base: Any, pool: Pool) -> Any:
    """The connection class, with a note to the pool when its server is no primary any more.

    And a task that sends can be cancelled at any moment, and a connection that breaks off is one to uvloop
    too, whose own error for it redis-py does not know. Commands are packed in C, as redis-py does only where
    it does not use asyncio.
    """

    pack = HiredisRespSerializer().pack

    class Noticing(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.demotions = pool.demotions

        def pack_command(self, *args: Any) -> list[bytes]:
            packed: list[bytes] = pack(*args)
            return packed

        async def send_packed_command(self, command: Any, *args: Any, **kwargs: Any) -> None:
            # redis-py sends with `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes
            # when the command has just been sent: a task that was told to end would go on for ever.
            try:
                with _OwnTimer(self) as timeout_s:
                    if _goes_at_once(self, command):
                        await super().send_packed_command(command, *args, **kwargs)
                    else:
                        async with asyncio.timeout(timeout_s):
                            await super().send_packed_command(command, *args, **kwargs)
            except TimeoutError as error:
                raise RedisTimeoutError("Redis does not take what is sent") from error
            except RuntimeError as error:
                if _UVLOOP_CLOSED not in str(error):
                    raise
                raise RedisConnectionError(str(error)) from error

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().read_response(*args, **kwargs)
            except ReadOnlyError:
                if self.demotions == pool.demotions:
                    pool.demotions += 1
                raise

    return Noticing


class _OwnTimer:
    """Takes the timeout of replies away from redis-py, as one timer of ours holds for all of them."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._timeout_s: float | None = connection.socket_timeout

    def __enter__(self) -> float | None:
        self._connection.socket_timeout = None
        return self._timeout_s

    def __exit__(self, *_: object) -> None:
        self._connection.socket_timeout = self._timeout_s


def _goes_at_once(connection: Any, command: Any) -> bool:
    """Whether sending needs no timeout: nothing would wait, and a timer for every command costs CPU."""
    if not connection.is_connected or connection._writer.transport.get_write_buffer_size():
        return False
    return isinstance(command, list) and sum(map(len, command)) <= _SENT_AT_ONCE


class NodePipeline(Pipeline):
    """A pipeline to one server, and what may have to go with it over the same connection.

    Attributes:
        asking: of a cluster: the slot is on its way to this node. Holds for one command, or a transaction.
        replicas: so many replicas must have the writes before this returns; until then it fails like a lost
            connection.
    """

    asking = False
    replicas = 0

    async def _execute_transaction(self, connection: Any, commands: Any, raise_on_error: bool) -> Any:
        await self._ask(connection)
        replies = await super()._execute_transaction(connection, commands, raise_on_error)
        await self._replicated(connection, replies)
        return replies

    async def _execute_pipeline(self, connection: Any, commands: Any, raise_on_error: bool) -> Any:
        await self._ask(connection)
        # The replies come together: one timer for all of them.
        try:
            with _OwnTimer(connection) as timeout_s:
                async with asyncio.timeout(timeout_s):
                    replies = await super()._execute_pipeline(connection, commands, raise_on_error)
        except TimeoutError as error:
            raise RedisTimeoutError("Redis does not answer") from error
        await self._replicated(connection, replies)
        return replies

    async def _ask(self, connection: Any) -> None:
        if self.asking:
            await connection.send_command("ASKING")
            await connection.read_response()

    async def _replicated(self, connection: Any, replies: list[Any]) -> None:
        if not self.replicas or all(isinstance(reply, Exception) for reply in replies):
            return
        if not connection.is_connected:  # another connection has written nothing: it would wait for nothing
            raise RedisConnectionError(
                "the connection was closed before the replicas had confirmed the write"
            )
        await connection.send_command("WAIT", self.replicas, _WAIT_MS, check_health=False)
        try:
            confirmed = await connection.read_response()
        except ResponseError as error:  # it was made a replica just now
            raise RedisConnectionError(str(error)) from error
        if confirmed < self.replicas:
            raise RedisConnectionError(
                f"{confirmed} replicas have confirmed the write, of {self.replicas} that must"
            )


class NodeClient(redis.asyncio.Redis):
    """redis-py's client, with such pipelines."""

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> NodePipeline:
        return NodePipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
