"""Connections to the primary that Sentinels name at the moment."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import redis.asyncio.sentinel
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError

from tokentape_core.addresses import HostPort
from tokentape_core.store.pool import Pool

_ASK_TIMEOUT_S: Final = 1.0
NOT_NOW: Final = ("NOREPLICAS", "MASTERDOWN")
"""A primary that was just made one refuses writes until its replicas have found it."""


class SentinelPool(Pool):
    """A pool whose connections ask the Sentinels for the primary, whenever they are made.

    A server that is a replica, or that lacks replicas for the moment, counts as a lost connection: the
    command is sent again until the deadline, to whichever server is the primary then.

    Args:
        sentinels: one that answers is enough.
        service: what they call the primary.
        sentinel_kwargs: for the connections to them.
    """

    def __init__(
        self,
        timeout_s: float | None,
        sentinels: tuple[HostPort, ...],
        service: str,
        sentinel_kwargs: Mapping[str, Any],
        connection_class: Any = Connection,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout_s, following(connection_class, self.primary), **kwargs)
        times = {"socket_timeout": _ASK_TIMEOUT_S, "socket_connect_timeout": _ASK_TIMEOUT_S}
        self._sentinels = redis.asyncio.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            sentinels, sentinel_kwargs={**sentinel_kwargs, **times}
        )
        self._service = service
        self._lookup: asyncio.Task[HostPort] | None = None

    async def primary(self) -> HostPort:
        """Where the primary is. Those who ask at the same time share one look."""
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.create_task(self._sentinels.discover_master(self._service))
            self._lookup.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._lookup)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        for sentinel in self._sentinels.sentinels:
            await sentinel.aclose()


def following(base: Any, primary: Any) -> Any:
    """The connection class, to the server that `primary()` names when it connects."""

    class Following(base):  # type: ignore[misc]
        async def _connect(self) -> None:
            self.host, self.port = await primary()
            await super()._connect()

        async def on_connect(self) -> None:
            await super().on_connect()
            await self.send_command("ROLE", check_health=False)
            # A Sentinel may not have heard yet that this one was demoted.
            if (await self.read_response())[0] != b"master":
                raise RedisConnectionError(f"{self.host}:{self.port} is a replica")

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            return await settled(self, super().read_response(*args, **kwargs))

    return Following


async def settled(connection: Any, response: Any) -> Any:
    """The response; a refusal that will pass becomes a lost connection, whose command is sent again."""
    try:
        return await response
    except ResponseError as error:
        if isinstance(error, ReadOnlyError) or str(error).startswith(NOT_NOW):
            await connection.disconnect()
            raise RedisConnectionError(str(error)) from error
        raise
