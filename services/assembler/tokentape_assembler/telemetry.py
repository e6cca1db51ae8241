"""All that a worker process tells about itself: its metrics, its spans, its canonical log lines.

Every name is here and in docs/reference/telemetry.md, which a test compares. The child processes measure
nothing: they hand their counts over with their answer (`Counts`).
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tokentape_assembler.counts import Counts
from tokentape_contracts.accounting import FATES
from tokentape_contracts.jobs import AssembleJob
from tokentape_contracts.samples import Status
from tokentape_core import logs
from tokentape_core.metrics import LAGS, Meter
from tokentape_core.tracing import NoTracing, Tracing

OUTCOMES: Final = ("stored", "failed", "dropped", "interrupted")
STAGES: Final = ("fold", "assemble", "encode")
CODES: Final = (
    "event_unsupported",
    "hook_failed",
    "prefix_broken",
    "replay_broken",
    "session_not_found",
    "stream_corrupt",
)
"""The codes of `outcome.REFUSALS`, which this process does not import: it would load a tokenizer's code."""
ENTRIES: Final = ("job", "sealed")
"""What is read that somebody else has written to Redis: a job of the queue, a session to archive."""
RESTARTS: Final = ("exited", "killed", "timeout", "abandoned", "failed_start")
MISMATCHES: Final = (
    "special_token_count",
    "special_token_type",
    "non_assistant_text",
    "assistant_text",
)
"""Those of `outcome`, which this process does not import either."""

log = logging.getLogger("tokentape.assembler")


class Telemetry:
    """The metrics of one worker process, and what measures them.

    Args:
        tracing: where spans go.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing or NoTracing()
        self.meter = meter = Meter()
        meter.build_info()
        self._jobs = meter.counters(
            "tokentape_job_outcomes_total",
            "Jobs by outcome: a result is stored, samples or a refusal; it failed; nobody waits for it any "
            "more; Redis was away.",
            outcome=OUTCOMES,
        )
        self._job_seconds = meter.histogram(
            "tokentape_job_duration_seconds", "From a job's claim to its announcement."
        )
        self._stage_seconds = meter.histograms(
            "tokentape_job_stage_seconds", "Stages of an assembly, in the child process.", stage=STAGES
        )
        self._refusals = meter.counters(
            "tokentape_job_refusals_total", "Jobs whose stored result is an error, by code.", code=CODES
        )
        self.running = meter.gauge("tokentape_jobs_running", "Jobs that this worker runs or announces.")
        self.children = meter.gauge("tokentape_children_ready", "Child processes that could run a job.")
        self.restarts = meter.counters(
            "tokentape_children_restarts_total",
            "Child processes that were replaced: they exited, or were killed; they were ended because their "
            "job took too long, or nobody waited for it any more; or a new one could not start.",
            reason=RESTARTS,
        )
        self.leases_lost = meter.counter(
            "tokentape_leases_lost_total",
            "Claims on running jobs that were gone: another worker may run them too.",
        )
        self.entries_refused = meter.counters(
            "tokentape_entries_refused_total",
            "Entries in Redis that could not be read and were passed over, by what they should have been.",
            kind=ENTRIES,
        )
        self._samples = meter.counters(
            "tokentape_assembly_samples_total",
            "Samples that were assembled, by status.",
            status=tuple(Status),
        )
        self._leaves = meter.counters(
            "tokentape_assembly_leaves_total",
            "Leaves of the assembled sessions: picked for a sample, or dropped (retried turns, by default).",
            fate=("picked", "dropped"),
        )
        self._tokens = meter.counters(
            "tokentape_assembly_tokens_total",
            "Sampled tokens of the assembled sessions: trained, or left out, by the reason.",
            fate=FATES,
        )
        self._mismatches = meter.counters(
            "tokentape_assembly_mismatches_total",
            "Entries of tito_session_mismatch in what was assembled, by type.",
            type=MISMATCHES,
        )
        self._lost = meter.counter(
            "tokentape_turns_lost_total",
            "Acknowledged turns that an assembly did not find. Must stay 0 (INV-1).",
        )
        self.loop_lag_seconds = meter.histogram(
            "tokentape_worker_loop_lag_seconds",
            "How late the event loop woke a sleeper, 10 times a second.",
            LAGS,
        )

    @contextmanager
    def job(self, job: AssembleJob, job_try: int) -> Iterator[None]:
        """Around one job: the span `assemble job`, the log line `job`, its duration."""
        began = time.perf_counter()
        trace = job.trace or {}
        with (
            logs.canonical(log, "job", session=job.session_id) as line,
            self.tracing.span("assemble job", "consumer", trace, session=job.session_id),
        ):
            line |= {"request": job.request, "try": job_try, "outcome": "interrupted"}
            try:
                yield
            finally:
                if line["outcome"] in ("failed", "interrupted"):
                    line["level"] = logging.WARNING
                self._jobs[line["outcome"]].inc()
                self._job_seconds.observe(time.perf_counter() - began)

    def ended(
        self, outcome: str, code: str, detail: str, timing_ms: Mapping[str, float], counts: Counts
    ) -> None:
        """Says, inside of `job`, how it ended.

        Args:
            code: of an error, stored or not.
            detail: of a failure the reason.
        """
        said = {"code": code, "detail": detail}
        logs.note(outcome=outcome, stages=timing_ms, **{name: text for name, text in said.items() if text})
        if counts.tokens:
            logs.note(tokens=dict(counts.tokens))
        self.tracing.annotate(outcome=outcome, code=code, **timing_ms)
        for stage, ms in timing_ms.items():
            self._stage_seconds[stage].observe(ms / 1000)
        if outcome == "stored" and code:
            self._refusals[code].inc()
        for status, count in counts.samples.items():
            self._samples[status].inc(count)
        self._leaves["picked"].inc(counts.picked)
        self._leaves["dropped"].inc(counts.dropped)
        for fate, count in counts.tokens.items():
            self._tokens[fate].inc(count)
        for kind, count in counts.mismatches.items():
            self._mismatches[kind].inc(count)
        self._lost.inc(counts.lost)
