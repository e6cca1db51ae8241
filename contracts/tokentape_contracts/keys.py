"""The names of everything Tokentape keeps in Redis.

The braces are a Redis Cluster hash tag: all keys of one session lie in one slot, so that a transaction over
them is allowed there. No transaction or pipeline spans a session's keys and others.

Two servers may hold them: one the sessions and what belongs to them, the other the queue: `QUEUE`, `WAKE`,
`replies`, and whatever else begins with `arq:`.
"""


def events(session_id: str) -> str:
    """The session's event stream: the truth, from which all else is derived."""
    return f"tt:{{{session_id}}}:events"


def blobs(session_id: str) -> str:
    """A hash: the routing replay rows of the session's turns. One key, as they live and expire together."""
    return f"tt:{{{session_id}}}:blobs"


def blob_part(event_id: str, kind: str, part: int) -> str:
    """A field of `blobs`: part number `part`, from 0, of one turn's rows of one kind."""
    return f"{event_id}:{kind}:{part}"


def audit(session_id: str) -> str:
    """The session's audit stream: what was assembled from its events, and how."""
    return f"tt:{{{session_id}}}:audit"


def archiving(session_id: str) -> str:
    """A string: some worker writes this session to the archive at the moment."""
    return f"tt:{{{session_id}}}:archiving"


def replicated(session_id: str) -> str:
    """A string that is gone at once: written to wait until the replicas have what was written before."""
    return f"tt:{{{session_id}}}:replicated"


def samples(session_id: str, request: str) -> str:
    """A hash: the result (`JobResult`) of one samples request. `request` is its digest at a tail."""
    return f"tt:{{{session_id}}}:samples:{request}"


def waiters(session_id: str, request: str) -> str:
    """A sorted set: the API processes that wait for that result, scored by their deadlines (Unix seconds)."""
    return f"tt:{{{session_id}}}:waiters:{request}"


def tenant(name: str) -> str:
    """A sorted set: the open sessions of a tenant, scored by Unix seconds: until when each counts."""
    return f"tt:tenant:{{{name}}}:sessions"


def replies(api_id: str) -> str:
    """A stream: announcements for one API process."""
    return f"tt:replies:{api_id}"


QUEUE = "arq:queue"
"""arq's sorted set of waiting and running jobs."""

WAKE = "tt:wake"
"""A list: one token per enqueued job, on which idle workers block."""

SEALED = "tt:sealed"
"""A sorted set: the sealed sessions that are not archived yet, scored by Unix seconds: when each was sealed,
or last tried in vain."""
