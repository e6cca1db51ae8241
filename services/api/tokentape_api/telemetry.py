"""All that an API process tells about itself: its metrics, its spans, its canonical log lines.

Every name is here and in docs/reference/telemetry.md, which a test compares.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from prometheus_client import Histogram
from starlette.requests import ClientDisconnect

from tokentape_api.engine import EngineRefusal
from tokentape_contracts.errors import (
    BY_CODE,
    EngineReplyInvalid,
    EngineTimeout,
    EngineUnavailable,
    GenerationAborted,
    InternalError,
    TokentapeError,
)
from tokentape_contracts.events import Blob, TurnRecorded
from tokentape_core import logs
from tokentape_core.domain.position import ROOTS, Position
from tokentape_core.domain.replay import KINDS
from tokentape_core.metrics import LAGS, Meter
from tokentape_core.tracing import NoTracing, Tracing

OTHER_ROUTE: Final = "other"
"""Any other path."""
STATUSES: Final = ("2xx", "3xx", "4xx", "5xx")
ENGINE_REFUSED: Final = "engine_refused"
"""The code of an engine's own refusal, which is passed on and has no code of ours."""
CLIENT_GONE: Final = "client_gone"
"""The code of a request whose client closed the connection."""
CODES: Final = (*BY_CODE, ENGINE_REFUSED, CLIENT_GONE)
ENGINE_CODES: Final = (
    *(error.code for error in (EngineUnavailable, EngineTimeout, GenerationAborted, EngineReplyInvalid)),
    ENGINE_REFUSED,
)
STAGES: Final = ("position", "render", "engine", "append")
TOKENS: Final = ("reused", "rendered", "sampled")
ENTRIES: Final = ("announcement", "result")
"""What a collect reads that somebody else has written to Redis."""
SAMPLES: Final = "samples"
"""The outcome of a collect that has no error."""


class Telemetry:
    """The metrics of one API process, and what measures them.

    Args:
        tracing: where spans go; None for nowhere.
        routes: the names of the application's.
    """

    def __init__(self, tracing: Tracing | None = None, routes: Sequence[str] = ()) -> None:
        self.tracing = tracing or NoTracing()
        self.meter = meter = Meter()
        meter.build_info()
        self.requests = meter.counters(
            "tokentape_api_requests_total",
            "Requests that were answered, by route and class of status.",
            route=(*routes, OTHER_ROUTE),
            status=STATUSES,
        )
        self.request_seconds = meter.histograms(
            "tokentape_api_request_seconds",
            "From a request's head to the end of its answer.",
            route=(*routes, OTHER_ROUTE),
        )
        self.errors = meter.counters("tokentape_api_errors_total", "Error replies, by code.", code=CODES)
        self.loop_lag_seconds = meter.histogram(
            "tokentape_api_loop_lag_seconds",
            "How late the event loop woke a sleeper, 10 times a second.",
            LAGS,
        )
        self._stage_seconds = meter.histograms(
            "tokentape_chat_stage_seconds", "Stages of a chat turn.", stage=STAGES
        )
        self._engine_errors = meter.counters(
            "tokentape_engine_errors_total",
            "Chat turns that failed at the engine, by code.",
            code=ENGINE_CODES,
        )
        self._recorded = meter.counter("tokentape_turns_recorded_total", "Turns in the stream.")
        self._refused = meter.counters(
            "tokentape_turns_refused_total", "Chat requests that recorded nothing, by code.", code=CODES
        )
        self._roots = meter.counters(
            "tokentape_turns_roots_total",
            "Recorded turns that continue no other: the session's first, those that repeat no recorded turn, "
            "those with other tools or template arguments than the turn that they repeat, and those whose "
            "messages the template cannot append.",
            reason=ROOTS,
        )
        self.conflicts = meter.counter(
            "tokentape_turns_conflicts_total",
            "Appends that found their place taken by a concurrent turn, and became its sibling.",
        )
        self._altered = meter.counter(
            "tokentape_turns_altered_answers_total",
            "Recorded answers that a request brought back altered and that were kept as recorded.",
        )
        self._trimmed = meter.counter(
            "tokentape_turns_trimmed_tokens_total",
            "Trailing tokens of a parent turn that the next prompt rendered anew.",
        )
        self._tokens = meter.counters(
            "tokentape_turns_tokens_total",
            "Tokens of recorded turns: of the parent and reused, rendered from new messages, sampled.",
            kind=TOKENS,
        )
        self._replay_rows = meter.counters(
            "tokentape_replay_rows_total", "Routing replay rows that the engine sent.", kind=KINDS
        )
        self._replay_stored = meter.counters(
            "tokentape_replay_stored_rows_total",
            "Routing replay rows that were stored: not the parent's again.",
            kind=KINDS,
        )
        self._replay_bytes = meter.counters(
            "tokentape_replay_stored_bytes_total", "Bytes of the stored routing replay rows.", kind=KINDS
        )
        self._replay_missing = meter.counters(
            "tokentape_replay_missing_total",
            "Recorded turns whose engine was asked for this payload and did not send it.",
            kind=KINDS,
        )
        self.sessions_opened = meter.counter("tokentape_sessions_opened_total", "Sessions opened.")
        self.sessions_deleted = meter.counter(
            "tokentape_sessions_deleted_total", "DELETEs that were answered 204, repeated ones included."
        )
        self._collects = meter.counters(
            "tokentape_collect_outcomes_total",
            "Collects by outcome: samples, or the code.",
            outcome=(SAMPLES, *BY_CODE, CLIENT_GONE),
        )
        self._collect_wait_seconds = meter.histogram(
            "tokentape_collect_wait_seconds",
            "The part of a collect that the worker's stages do not account for, as waiting for one.",
        )
        self._collect_bytes = meter.counter(
            "tokentape_collect_payload_bytes_total", "Bytes of samples that were sent."
        )
        self.queue_jobs = meter.gauge(
            "tokentape_queue_jobs",
            "Jobs that wait or run, over all processes, read at each scrape; NaN if Redis does not answer.",
        )
        self.work_waiting = meter.gauge(
            "tokentape_api_work_waiting", "Parts of requests that wait for a thread to work on them."
        )
        self.bodies_bytes = meter.gauge(
            "tokentape_api_bodies_bytes", "Bodies of the requests that are read or worked on."
        )
        self.entries_refused = meter.counters(
            "tokentape_entries_refused_total",
            "Entries in Redis that could not be read and were passed over, by what they should have been.",
            kind=ENTRIES,
        )
        self.cache_sessions = meter.gauge("tokentape_cache_sessions", "Folded sessions in memory.")
        self.cache_bytes = meter.gauge("tokentape_cache_bytes", "Their size, roughly.")
        self.cache_lookups = meter.counters(
            "tokentape_cache_lookups_total",
            "Uses of a session: a hit reads only what is newer, a miss the whole stream.",
            result=("hit", "miss"),
        )

    @contextmanager
    def turn(self, session_id: str, headers: Mapping[str, str]) -> Iterator[None]:
        """Around one chat request: the span `chat`, and what became of a turn that was not recorded."""
        with self.tracing.span("chat", "server", headers, session=session_id):
            try:
                yield
            except Exception as error:
                code = code_of(error)
                self._refused[code].inc()
                if code in self._engine_errors:
                    self._engine_errors[code].inc()
                raise

    def stage(self, stage: str) -> AbstractContextManager[None]:
        """Around one of `STAGES`, which is also the name of a span."""
        span = self.tracing.span(stage, "client" if stage == "engine" else "internal")
        return _Stage(stage, span, self._stage_seconds[stage])

    def recorded(self, event: TurnRecorded, at: Position) -> None:
        """Counts a turn that is in the stream."""
        self._recorded.inc()
        self._tokens["reused"].inc(event.keep)
        self._tokens["rendered"].inc(len(event.suffix))
        self._tokens["sampled"].inc(len(event.output))
        if event.altered:
            self._altered.inc(len(event.altered))
        if at.parent is not None:
            self._trimmed.inc(at.parent.length - event.keep)
        if at.root is not None:
            self._roots[at.root].inc()

    def replayed(self, kind: str, stored: tuple[Blob, bytes] | None) -> None:
        """Counts a routing replay payload that a recorded turn asked for; None if it did not come."""
        if stored is None:
            self._replay_missing[kind].inc()
            return
        blob, data = stored
        self._replay_rows[kind].inc(blob.rows)
        self._replay_stored[kind].inc(sum(count for _, count in blob.stored))
        self._replay_bytes[kind].inc(len(data))

    @contextmanager
    def collect(self, session_id: str, headers: Mapping[str, str]) -> Iterator[None]:
        """Around one collect, up to the head of its answer: the span `collect`, and its outcome."""
        with self.tracing.span("collect", "server", headers, session=session_id):
            try:
                yield
            except Exception as error:
                self._collects[code_of(error)].inc()
                raise
            self._collects[SAMPLES].inc()

    def collected(self, size: int, stages: Mapping[str, float]) -> None:
        """Counts the bytes of a collect's samples and its wait; `stages` in milliseconds."""
        self._collect_bytes.inc(size)
        self._collect_wait_seconds.observe(stages["queue"] / 1000)
        logs.note(stages={stage: round(ms, 3) for stage, ms in stages.items()}, bytes=size)


class _Stage:
    """Measures its block, of which there are several in every turn: no generator."""

    __slots__ = ("_began", "_name", "_seconds", "_span")

    def __init__(self, name: str, span: AbstractContextManager[None], seconds: Histogram) -> None:
        self._name = name
        self._span = span
        self._seconds = seconds

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._span.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._span.__exit__(*error)
        finally:
            seconds = time.perf_counter() - self._began
            self._seconds.observe(seconds)
            logs.note_stage(self._name, seconds)


def code_of(error: Exception) -> str:
    """One of `CODES`."""
    if isinstance(error, EngineRefusal):
        return ENGINE_REFUSED
    if isinstance(error, ClientDisconnect):
        return CLIENT_GONE
    return error.code if isinstance(error, TokentapeError) else InternalError.code
