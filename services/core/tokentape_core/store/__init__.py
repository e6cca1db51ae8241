"""Where sessions are kept: the port (`port`), and its implementations on Redis and in memory."""

from tokentape_core.store.connect import connect
from tokentape_core.store.memory import MemoryStore
from tokentape_core.store.port import Entry, SeqTaken, SessionExists, Store
from tokentape_core.store.redis import RedisStore, redis_errors

__all__ = [
    "Entry",
    "MemoryStore",
    "RedisStore",
    "SeqTaken",
    "SessionExists",
    "Store",
    "connect",
    "redis_errors",
]
