"""The assembler: an arq worker that turns recorded sessions into training samples.

    Redis queue ──▶ Worker ──▶ JobRunner ──▶ Executor ──pipe──▶ child process ──▶ result in Redis
                    (claims,    (waiters,     (kill, rebuild)    (read, fold, assemble, encode)
                     leases)     announcements)

The worker's event loop does no computing: whatever grows with a session runs in a child process, which can
be killed (INV-5). One module a noun:

- `settings`  what a worker process is started with
- `run`       the entry points: `run` blocks until a signal, `serve` until an event
- `worker`    arq's worker, made wakeable, with short leases and draining
- `job`       one job: who waits for it, until when, and the announcement of its outcome
- `executor`  child processes that answer messages, and can be killed and rebuilt
- `child`     the program of a child process
- `outcome`   what a job gives: read, fold, assemble, encode
- `counts`    what an assembly counted, for the metrics
- `telemetry` metrics, spans and log lines of the worker process
- `endpoint`  metrics and probes over HTTP
- `toolchain` what an assembly needs besides the events
- `archive`   copies sealed sessions to where they outlive Redis

Nothing is imported here: a child process must not pay for arq.
"""
