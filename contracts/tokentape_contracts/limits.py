"""Every bound that a request, a session or a job can meet, with its unit in its name (INV-10).

A bound that is hit gives the error named beside it; nothing is cut silently. What lies within one of these
stands where it is used: pauses, sizes of buffers, and the time of one attempt of several, such as a reply of
Redis within `STORE_RETRY_S`.
"""

from typing import Final

MiB: Final = 1024 * 1024

# Requests
CHAT_BODY_BYTES: Final = 16 * MiB
"""A chat request's body; above it `request_too_large`. A body re-sends the conversation, hence the size."""
SMALL_BODY_BYTES: Final = 1 * MiB
"""The body of `POST /sessions` and `POST …/samples`; above it `request_too_large`."""
PROXY_BODY_BYTES: Final = 16 * MiB
"""A body that the catch-all forwards to the engine; above it `request_too_large`."""
HEAD_BYTES: Final = MiB // 16
"""A request's path, query and header lines; above it the answer is a plain 400 and the connection closes."""
PROXY_TARGET_CHARS: Final = 8_192
"""Path and query that the catch-all forwards, decoded; longer is `invalid_request`."""
REQUEST_HEAD_S: Final = 60.0
"""From the first byte of a request's head to its last; beyond it the answer is a plain 400 and the connection
closes. As long as nginx waits by default: behind one, this changes nothing."""
REQUEST_BODY_S: Final = 60.0
"""A body may pause for so long; beyond it `invalid_request`, and the connection closes. The rest of a body
that was answered before its end is read for so long in all."""
REPLY_STALL_S: Final = 60.0
"""A client may take nothing of its reply for so long; beyond it the connection is cut. Linux does it."""
BODIES_BYTES: Final = 192 * MiB
"""Bodies of all requests that one API process reads or works on, together; one more is `overloaded`. A text
with characters outside of Latin-1 counts as what it takes in memory, which is up to four times its length."""
JSON_DEPTH: Final = 100
"""Objects and arrays inside each other in a body; deeper is `invalid_request`: it could not be written."""
JSON_VALUES: Final = 250_000
"""Values in a body, inside each other or not; more is `invalid_request`: a value takes up to 30 times the
memory of its text."""
PROMPT_TEXT_BYTES: Final = 2 * MiB
"""What a turn adds to a prompt, as the chat template writes it, in UTF-8; longer is `prompt_too_long`, before
it is tokenised, which takes up to 330 times as much memory. A byte is a token at the most."""
PROMPT_TOKENS: Final = 4_000_000
"""A whole prompt, kept tokens included; longer is `prompt_too_long`, before the engine is asked."""
SESSION_ID_CHARS: Final = 64
"""A session id in a path; a longer one is `session_not_found`."""
QUOTED_VALUE_CHARS: Final = 120
"""How much of a message's value an error quotes."""

# Sessions
TURNS_PER_SESSION: Final = 1024
"""Turns in a session; one more is `session_full`, before the engine is asked."""
SESSION_BYTES: Final = 128 * MiB
"""A session's turns in memory; one more is `session_full`, before the engine is asked. Half of what a process
keeps of all sessions."""
VIEW_TOKENS: Final = 8_000_000
"""Tokens in the records of `GET /sessions/{sid}`, which repeat the prompt of every turn; more is
`invalid_request`. `?view=events` shows each token once."""
SESSION_IDLE_S: Final = 6 * 3600
"""A session to which nothing was appended for so long expires."""
RETENTION_S: Final = 24 * 3600
"""A deleted session can be read for audits for this long, unless `--retention-s` says otherwise."""
RETENTION_MIN_S: Final = SESSION_IDLE_S
"""The shortest `--retention-s`: as long as an open session stays. By then every collect that was accepted
before the DELETE has ended, and a session that the archive did not take was tried again many times."""
RETENTION_MAX_S: Final = 30 * 24 * 3600
"""The longest `--retention-s`. What is kept for longer belongs in an archive."""
SESSIONS_PER_TENANT: Final = 50_000
"""Open sessions of one tenant, or of all callers where there are no tokens; one more is `too_many_sessions`.
A session counts from its opening until it is deleted, and no longer than `SESSION_IDLE_S`."""
SESSIONS_RETRY_AFTER_S: Final = 10
"""`Retry-After` of `too_many_sessions`."""

# Access
TOKENS: Final = 1_000
"""Entries of a tokens file, each of which a request's token is compared with; a longer file is refused."""
TOKENS_FILE_BYTES: Final = 1 * MiB
"""A tokens file; a larger one is refused before it is parsed."""
TOKENS_RELOAD_S: Final = 2.0
"""A tokens file that has changed counts after this long, at the next request."""
TENANT_CHARS: Final = 64
"""A tenant's or a token's name; a longer one is refused with the tokens file."""

# API process
SESSION_CACHE_BYTES: Final = 256 * MiB
"""Folded sessions that one API process keeps; beyond it the least recently used are folded again."""
ENGINE_TIMEOUT_S: Final = 900.0
"""One generation, or all of an answer that the catch-all passes on; beyond it `engine_timeout`."""
ENGINE_REPLY_BYTES: Final = 512 * MiB
"""An engine's answer; above it `engine_reply_invalid`."""
LOGPROB_MAX: Final = 0.01
"""The log-prob of a sampled token, which is 0 at the most, and may be off by a rounding; above it
`engine_reply_invalid`."""
REPLAY_BYTES: Final = 256 * MiB
"""One routing replay payload of one turn, decoded (int32 as SGLang sends it); above it
`engine_reply_invalid`, before anything is stored."""
ENGINE_CONNECTIONS: Final = 2048
"""Connections of one API process to the engine, for chats, and as many for the catch-all; while all are busy,
requests wait for one, which counts as time of the engine: `engine_timeout`."""
ENGINE_CONNECT_S: Final = 10.0
"""Connecting to the engine; beyond it `engine_unavailable`."""
API_KEEP_ALIVE_S: Final = 75
"""An idle client's connection, also one that never sent anything, is closed after this: later than common
clients (5 s) and load balancers (60 s) drop theirs, so that no request meets a connection which is just being
closed."""
ENGINE_KEEP_ALIVE_S: Final = 2.0
"""Idle connections to the engine are dropped before it drops them (uvicorn after 5 s): a chat that meets a
connection which is just being closed is 503 `engine_unavailable`."""
DRAIN_S: Final = 30
"""After SIGTERM an API process finishes its requests: a whole generation (`--engine-timeout-s`), and so long
beyond it. A worker finishes its jobs, each within `ASSEMBLY_TIMEOUT_S`."""
LAST_REQUEST_S: Final = 1.0
"""After SIGTERM an API process reads its idle connections for this long: a request may be on its way."""
STORE_RETRY_S: Final = 10.0
"""How long a command to Redis is tried again before `store_unavailable`. The last attempt may add the 5 s for
which it waits for a reply."""
STORE_CONNECTIONS: Final = 1024
"""Connections of one process to Redis; while all are busy, commands wait for one up to `STORE_RETRY_S`."""
STORE_VALUE_BYTES: Final = MiB // 4
"""The longest single value written to Redis: longer routing replay rows and results are cut into parts,
because a value of 100 MiB would stall the server for everybody."""
WORK_INLINE_BYTES: Final = MiB // 512
"""Work on a request up to the cost of tokenising so many bytes (well under 2 ms) is done on the event loop,
other work in a thread."""
WORK_QUEUE: Final = 512
"""Pieces of work of one size that wait for a thread; one more is `overloaded`, for whoever has the most of
them waiting."""
WORK_WAIT_S: Final = 60.0
"""How long one of them waits for its thread; beyond it `overloaded`."""
OVERLOADED_RETRY_AFTER_S: Final = 1
"""`Retry-After` of `overloaded`."""

READY_TIMEOUT_S: Final = 2.0
"""`GET /ready` waits this long for Redis and the engine's health."""
PROBE_TIMEOUT_S: Final = 60.0
"""The tiny generation by which an engine is probed; beyond it the probe has failed and is sent again."""

# Samples
COLLECT_DEADLINE_S: Final = 110.0
"""A collect's deadline if its body names none: below the 120 s after which existing drivers give up."""
COLLECT_DEADLINE_MAX_S: Final = 3600.0
"""The longest deadline a body may ask for; above it `invalid_request`."""
QUEUE_DEPTH: Final = 2_000
"""Collects that wait or run, over all API processes; one more is `queue_full`."""
QUEUE_RETRY_AFTER_S: Final = 1
"""`Retry-After` of `queue_full`."""
RESULT_TTL_S: Final = 600
"""An assembled result is kept for a repeated request for this long."""
ASSEMBLY_TIMEOUT_S: Final = 300.0
"""One assembly in a worker; the child process is ended beyond it, whatever the deadline."""
SAMPLE_VALUES: Final = 1_000_000
"""Values in one JSON field of a sample, such as its metadata; more, as in a value that holds itself, is
`hook_failed`."""
WAIT_SLICE_S: Final = 1.0
"""A waiting collect looks after its job this often, in case an announcement was lost."""
LEASE_S: Final = 2.0
"""A worker renews its claim on a running job; a killed worker's job runs again after this."""
REPLY_STREAM_LENGTH: Final = 10_000
"""Announcements kept for one API process; a missed one is found by reading the result key."""
REPLY_STREAM_S: Final = 3600
"""The reply stream of an API process that is gone expires after this."""
JOB_TRIES: Final = 5
"""A job that took so many workers down with it is `assembly_failed`."""
QUEUE_READ: Final = 512
"""Queue entries that a worker looks at for a free job. Running jobs stay in the queue, so this must be well
above the executors of the whole fleet."""
CHILD_START_S: Final = 120.0
"""A worker's child process must have loaded its tokenizer within this."""
WORKER_HEAD_S: Final = 5.0
"""The head of a request for a worker's probes or metrics must be here by then, or the connection closes
without an answer."""
WORKER_HEAD_BYTES: Final = MiB // 64
"""The length of such a head, to its last line's end; above it the connection closes without an answer."""

# Audit and archive
AUDIT_ENTRIES: Final = 256
"""Entries of a session's audit stream, give or take those of one node of Redis; the oldest are dropped."""
ARCHIVE_EVERY_S: Final = 10.0
"""A worker looks this often for sealed sessions to archive."""
ARCHIVE_SESSIONS: Final = 100
"""Sessions that a worker takes at one look."""
ARCHIVE_AFTER_S: Final = 5400
"""A sealed session is archived this long after its seal: collects that were accepted before it, which add to
its audit, have ended by then."""
ARCHIVE_RETRY_S: Final = 600
"""A session that could not be archived is tried again after this."""
ARCHIVE_LEASE_S: Final = 300
"""A session that a worker began to archive is left alone by the others for this long. A store that has not
taken a session within this counts as failed."""

# Driver
DRIVER_OPEN_S: Final = 30.0
"""Opening a session; beyond it `TransportError`."""
DRIVER_COLLECT_S: Final = 120.0
"""A collect's total time if the caller names none; beyond it `CollectTimeout`."""
DRIVER_HEAD_START: Final = 0.1
"""The part of a collect's deadline by which the server's own ends earlier …"""
DRIVER_HEAD_START_MAX_S: Final = 10.0
"""… and its greatest length: the default of 120 s leaves the server
its own default of 110 s."""
DRIVER_DELETE_S: Final = 5.0
"""A DELETE; beyond it `TransportError`, and the session expires by itself."""
DRIVER_KEEP_ALIVE_S: Final = 2.0
"""Idle connections are dropped before common servers drop theirs (5 s): a POST that meets a connection which
is just being closed fails, and is not repeated."""
DRIVER_QUOTED_BODY_CHARS: Final = 500
"""How much of a foreign body an error quotes."""
DRIVER_AGENT_ERROR_CHARS: Final = 2000
"""How much of an agent's exception becomes metadata."""
