"""Where Redis is: the forms of a Redis URL, as text alone.

    redis://user:password@host:port/db                                  one server
    unix://path?db=0                                                    the same, on this machine
    redis+sentinel://user:password@host:port,host:port/service/db       the primary that Sentinels name
    redis+cluster://user:password@host:port,host:port                   a cluster; some of its nodes

`rediss` instead of `redis` is over TLS. What stands behind `?` is for the connections, as redis-py names it;
`sentinel_username` and `sentinel_password` are for those to the Sentinels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379

SINGLE: Final = ("redis", "rediss", "unix")
SENTINEL: Final = ("redis+sentinel", "rediss+sentinel")
CLUSTER: Final = ("redis+cluster", "rediss+cluster")
_SENTINEL_FIELDS: Final = ("username", "password")

HostPort = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """A Redis URL, taken apart.

    Attributes:
        kind: one server, the primary that Sentinels name, or a cluster.
        url: for the connections, as redis-py reads it; of several hosts it names the first.
        hosts: the Sentinels, or nodes of the cluster; of one server none.
        service: what the Sentinels call the primary.
        sentinel: `username` and `password` for the Sentinels, where they ask for them.
    """

    kind: Literal["single", "sentinel", "cluster"]
    url: str = field(repr=False)
    hosts: tuple[HostPort, ...] = ()
    service: str = ""
    sentinel: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises `ValueError`, which quotes nothing of the text: it may hold a password."""
        parts = urlsplit(text)
        if not text.partition("://")[2]:
            raise ValueError("it must go on after ://, as in redis://host:6379/0")
        if parts.scheme in SINGLE:
            if parts.scheme != "unix":
                _hosts(parts.netloc, REDIS_PORT)
            return cls("single", text)
        if parts.scheme in SENTINEL:
            return _sentinel(parts)
        if parts.scheme in CLUSTER:
            if parts.path.strip("/") not in ("", "0"):
                raise ValueError("a cluster has no databases: nothing may follow the hosts but options")
            hosts = _hosts(parts.netloc, REDIS_PORT)
            return cls("cluster", _plain(parts, hosts[0], "", parts.query), hosts)
        schemes = ", ".join(f"{scheme}://" for scheme in (*SINGLE, *SENTINEL, *CLUSTER))
        raise ValueError(f"a Redis URL must begin with one of {schemes}")


def queue_url(redis_url: str, queue_redis_url: str | None) -> str:
    """Where the queue lies: where the sessions do, unless it is told.

    Raises:
        ValueError: that would be a cluster. arq's transactions span keys of several slots.
    """
    url = queue_redis_url or redis_url or ""  # of `up`, which may bring its own
    if urlsplit(url).scheme in CLUSTER:
        raise ValueError(
            "queue-redis-url is needed, and may not be a cluster: the queue cannot be spread over nodes. A "
            "small Redis of its own will do, also behind Sentinels"
        )
    return url


def _sentinel(parts: SplitResult) -> Address:
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the name of the service is missing: redis+sentinel://host:port,host:port/SERVICE")
    if database and not database.isdecimal():
        raise ValueError("what follows the name of the service is no number of a database")
    query = parse_qsl(parts.query)
    names = {f"sentinel_{name}": name for name in _SENTINEL_FIELDS}
    rest = urlencode([(name, value) for name, value in query if name not in names])
    hosts = _hosts(parts.netloc, SENTINEL_PORT)
    return Address(
        "sentinel",
        _plain(parts, hosts[0], f"/{database or 0}", rest),
        hosts,
        unquote(service),
        {names[name]: value for name, value in query if name in names},
    )


def _plain(parts: SplitResult, first: HostPort, path: str, query: str) -> str:
    user, at, _ = parts.netloc.rpartition("@")
    host = f"[{first[0]}]" if ":" in first[0] else first[0]
    scheme = parts.scheme.partition("+")[0]
    return SplitResult(scheme, f"{user}{at}{host}:{first[1]}", path, query, "").geturl()


def _hosts(netloc: str, default_port: int) -> tuple[HostPort, ...]:
    found = []
    for text in netloc.rpartition("@")[2].split(","):
        try:
            one = urlsplit(f"//{text}")
            host, port = one.hostname, one.port
        except ValueError:
            raise ValueError(
                "its port is no number; special characters of a password must be percent-encoded"
            ) from None
        if not host:
            raise ValueError("a host is missing")
        found.append((host, port or default_port))
    return tuple(found)
