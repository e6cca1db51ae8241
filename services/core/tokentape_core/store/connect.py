"""From a Redis URL to a client."""

from typing import Any

import redis.asyncio
from redis.asyncio.connection import parse_url

from tokentape_core.addresses import Address
from tokentape_core.store.cluster import ClusterClient
from tokentape_core.store.pool import SOCKET_TIMEOUT_S, NodeClient, Pool
from tokentape_core.store.sentinel import SentinelPool


def connect(url: str, *, timeout_s: float | None = SOCKET_TIMEOUT_S) -> redis.asyncio.Redis:
    """A client that survives a restart of the server, a failover and a resharding: commands are tried again.

    Sending a command again is safe for every command that Tokentape uses. Nothing connects before the first
    command. `timeout_s` bounds the wait for a reply; None for a client that blocks on purpose.

    Raises:
        ValueError: the URL is none of those that `addresses` describes.
    """
    address = Address.parse(url)
    kwargs: dict[str, Any] = {**parse_url(address.url)}
    if address.kind == "single":
        return NodeClient.from_pool(Pool(timeout_s, **kwargs))
    first = {name: kwargs.pop(name, None) for name in ("host", "port")}
    if address.kind == "cluster":
        return ClusterClient(address.hosts, timeout_s, kwargs)
    ssl = {name: value for name, value in kwargs.items() if name.startswith("ssl_")}
    tls = {"ssl": True, **ssl} if url.startswith("rediss") else {}
    pool = SentinelPool(
        timeout_s, address.hosts, address.service, {**address.sentinel, **tls}, **first, **kwargs
    )
    return NodeClient.from_pool(pool)
