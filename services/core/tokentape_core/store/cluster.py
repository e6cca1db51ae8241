"""The client of a Redis Cluster.

redis-py has one, and it does not do for us. It knows no MULTI, sends ASKING over one connection and the
command over another, closes every connection of the process when one node is away, and gives up after three
attempts rather than after a time. Ours is small, because Tokentape asks little of a cluster: a command has
its key as first argument, and all keys of a pipeline lie in one slot.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import redis.asyncio
from redis.asyncio.cluster import ClusterParser
from redis.asyncio.connection import Connection
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    MovedError,
    RedisError,
    TryAgainError,
    WatchError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from tokentape_contracts.errors import text_of
from tokentape_core.addresses import HostPort
from tokentape_core.store.pool import LOST, NodeClient, NodePipeline, Pool, UntilDeadline
from tokentape_core.store.sentinel import settled

_LOOK_S: Final = 1.0
"""A node has this long to say which node holds which slot; then the next one is asked."""
_REDIRECTS: Final = 5
"""So many at once; where nodes disagree, there is a pause before more."""
_UNSETTLED: Final = (ClusterDownError, TryAgainError)
_ELSEWHERE: Final = (AskError, *_UNSETTLED)  # a MovedError is an AskError

T = TypeVar("T")


class ClusterClient(redis.asyncio.Redis):
    """Sends each command, and each pipeline, to the node that holds its slot.

    Whatever a cluster does passes within `limits.STORE_RETRY_S` or is an error: a slot that has moved or is
    just moving, a node that is away, a replica that takes over, a cluster that is down. Hence a command may
    be sent more than once, as `pool` says of one server.

    Args:
        seeds: some of the nodes; one that answers is enough, at the start and whenever all others are gone.
        timeout_s: the wait for a reply; None for ever.
        node_kwargs: for the connections to every node.
    """

    def __init__(
        self, seeds: Sequence[HostPort], timeout_s: float | None, node_kwargs: Mapping[str, Any]
    ) -> None:
        self._seeds = seeds
        self._timeout_s = timeout_s
        self._node_kwargs = {**node_kwargs, "parser_class": ClusterParser}
        self._nodes: dict[HostPort, NodeClient] = {}
        self._owners: list[HostPort] = []
        """Of each slot; empty if that has to be asked."""
        self._lock = asyncio.Lock()
        self._until_deadline = UntilDeadline()
        super().__init__(connection_pool=self._node(seeds[0]).connection_pool)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async def run(node: NodeClient, is_asking: bool) -> Any:
            if not is_asking:
                return await node.execute_command(*args, **options)  # type: ignore[no-untyped-call]
            pipe = node.pipeline(transaction=False)
            pipe.asking = True
            pipe.execute_command(*args, **options)
            [reply] = await pipe.execute(raise_on_error=False)
            if isinstance(reply, Exception):
                raise reply
            return reply

        return await self.at(_slot(args), run)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> "ClusterPipeline":  # noqa: ARG002 - as redis-py has it
        return ClusterPipeline(self, transaction)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: ARG002 - as redis-py has it
        for node in self._nodes.values():
            await node.connection_pool.disconnect()

    async def at(self, slot: int, run: Callable[[NodeClient, bool], Awaitable[T]]) -> T:
        """What `run` returns on the node that holds the slot; it is called until it does, or the deadline.

        Args:
            run: gets the node, and whether it must send ASKING before what it sends.
        """

        async def do() -> T:
            owner, is_asking = await self._owner(slot), False
            for _ in range(_REDIRECTS):
                try:
                    return await run(self._node(owner), is_asking)
                except MovedError as error:
                    owner, is_asking = _address(error, owner), False
                    if self._owners:
                        self._owners[slot] = owner
                except AskError as error:
                    owner, is_asking = _address(error, owner), True
                except _UNSETTLED as error:
                    text = f"the slot {slot} is not settled: {type(error).__name__} {error}"
                    raise RedisConnectionError(text) from error
                except LOST:
                    self._forget(slot, owner)
                    raise
            raise RedisConnectionError(f"the nodes do not agree on who holds the slot {slot}")

        async def fail(_: RedisError) -> None: ...

        return await self._until_deadline.call_with_retry(do, fail)

    async def _owner(self, slot: int) -> HostPort:
        if not self._owners:
            async with self._lock:
                if not self._owners:
                    self._owners = await self._look()
        return self._owners[slot]

    def _forget(self, slot: int, owner: HostPort) -> None:
        """After an error of a node: a replica may have taken over. One that has been noted already stays."""
        if self._owners and self._owners[slot] == owner:
            self._owners = []

    async def _look(self) -> list[HostPort]:
        """Which node holds which slot, from the first node that says so for all of them."""
        known = [*self._nodes.keys() - set(self._seeds), *self._seeds]
        reason: object = "none is known"
        refused: AuthenticationError | None = None
        for asked in random.sample(known, len(known)):
            try:
                async with asyncio.timeout(_LOOK_S):
                    node = self._node(asked)
                    rows = await node.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except AuthenticationError as error:
                reason = refused = error
                continue
            except (RedisError, *LOST) as error:
                reason = text_of(error)
                continue
            owners: list[HostPort | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
            for first, last, (host, port, *_), *_ in rows:
                owner = (host.decode() if host else asked[0], port)
                owners[first : last + 1] = [owner] * (last + 1 - first)
            whole = [owner for owner in owners if owner is not None]
            if len(whole) == len(owners):
                await self._drop(set(whole))
                return whole
            reason = f"{asked[0]}:{asked[1]} knows of no node for {len(owners) - len(whole)} slots"
        if refused is not None:  # trying again does not help
            raise refused
        raise RedisConnectionError(f"no node of the cluster says which holds which slot: {reason}")

    async def _drop(self, owners: set[HostPort]) -> None:
        """Closes the connections to nodes that hold nothing any more."""
        for gone in self._nodes.keys() - owners - set(self._seeds):
            with contextlib.suppress(*LOST):
                await self._nodes.pop(gone).connection_pool.disconnect()

    def _node(self, address: HostPort) -> NodeClient:
        if address not in self._nodes:
            pool = _NodePool(self._timeout_s, host=address[0], port=address[1], **self._node_kwargs)
            self._nodes[address] = NodeClient(connection_pool=pool)
        return self._nodes[address]


class ClusterPipeline(NodePipeline):
    """A pipeline whose keys lie in one slot.

    A transaction is sent again as a whole: it was done, or none of it. Of another pipeline only those
    commands are sent again that were refused, each to where its key is: while a slot moves, one of the keys
    may be here and the next there.
    """

    def __init__(self, client: ClusterClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    async def watch(self, *names: Any) -> None:  # type: ignore[override]
        async def run(node: NodeClient, is_asking: bool) -> None:
            if is_asking:
                raise RedisConnectionError("some of the keys are on their way to another node")
            self.connection_pool = node.connection_pool
            try:
                await super(ClusterPipeline, self).watch(*names)
            except BaseException:
                await self.reset()  # type: ignore[no-untyped-call]
                raise

        await self._client.at(_slot(("WATCH", *names)), run)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        if self.watching:
            try:
                return await super().execute(raise_on_error)
            except _ELSEWHERE as error:
                raise WatchError("the keys are on their way to another node") from error
        stack = list(self.command_stack)
        await self.reset()  # type: ignore[no-untyped-call]
        if not stack:
            return []
        slots = {_slot(args) for args, _ in stack}
        if len(slots) > 1:
            raise ClusterCrossSlotError(f"the keys of a pipeline lie in {len(slots)} slots")
        slot = slots.pop()
        replies = await self._client.at(slot, partial(self._send, stack))
        for number, reply in enumerate(replies):
            if isinstance(reply, _ELSEWHERE):
                [replies[number]] = await self._client.at(slot, partial(self._send, [stack[number]]))
        if raise_on_error:
            self.raise_first_error(stack, replies)
        return replies

    async def _send(self, stack: list[Any], node: NodeClient, is_asking: bool) -> list[Any]:
        pipe = node.pipeline(self.is_transaction)
        pipe.command_stack = list(stack)
        pipe.asking, pipe.replicas = is_asking, self.replicas
        replies = await pipe.execute(raise_on_error=False)
        if len(stack) == 1 or all(isinstance(reply, MovedError) for reply in replies):
            for reply in replies:
                if isinstance(reply, _ELSEWHERE):
                    raise reply
        return replies


class _NodePool(Pool):
    """A pool whose connections find a node lost that lacks replicas for the moment."""

    def __init__(self, timeout_s: float | None, connection_class: Any = Connection, **kwargs: Any) -> None:
        class Settling(connection_class):  # type: ignore[misc]
            async def read_response(self, *args: Any, **kwargs: Any) -> Any:
                return await settled(self, super().read_response(*args, **kwargs))

        super().__init__(timeout_s, Settling, **kwargs)


def _slot(args: Sequence[Any]) -> int:
    """Of a command; one without a key may go anywhere."""
    if len(args) < 2:
        return 0
    key = args[1]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def _address(error: AskError, asked: HostPort) -> HostPort:
    """Where a node sends us; without a host it means its own."""
    return (error.host or asked[0], error.port)
