"""The names of everything Tokentape keeps in Redis.

The braces are a Redis Cluster hash tag: all keys of one session lie in one slot, so that a transaction over
them is allowed there.
"""


def events(session_id: str) -> str:
    """The session's event stream: the truth, from which all else is derived."""
    return f"tt:{{{session_id}}}:events"


def samples(session_id: str, request: str) -> str:
    """A hash: the result of one samples request. `request` is `SamplesRequest.digest` at a tail."""
    return f"tt:{{{session_id}}}:samples:{request}"


def waiters(session_id: str, request: str) -> str:
    """A sorted set: the API processes that wait for that result, scored by their deadlines (Unix seconds)."""
    return f"tt:{{{session_id}}}:waiters:{request}"


def replies(api_id: str) -> str:
    """A stream: announcements for one API process."""
    return f"tt:replies:{api_id}"


QUEUE = "arq:queue"
"""arq's sorted set of waiting and running jobs."""

WAKE = "tt:wake"
"""A list: one token per enqueued job, on which idle workers block."""
