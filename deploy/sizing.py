"""`python -m deploy.sizing`: writes docs/reference/sizing.md, from benchmarks/results and the limits.

With --check it writes nothing and exits with 1 if the page is not current.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final

from tokentape_contracts import limits

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE: Final = ROOT / "docs" / "reference" / "sizing.md"

LIVE: Final = (1_000, 10_000, 100_000)
TURNS: Final = 100
"""Of a session, with the benchmarks' 514 new tokens each."""
TURN_S: Final = 15.0
"""From one turn of a session to its next: generation, tools, environment."""
BURST_S: Final = 60.0
"""In which the collects of all live sessions are done if they end together."""
UTILIZATION: Final = 0.6
"""Of an API pod's CPU, the autoscaler's target."""
CHILDREN: Final = 2
"""Of a worker pod: TOKENTAPE_WORKERS."""
API_CONNECTIONS: Final = 2 * limits.STORE_CONNECTIONS + 1
"""Of an API process to Redis at the most: for the sessions, for the queue, and one that hears of results."""
WORKER_CONNECTIONS: Final = 4
"""Of a worker process: its loop, its leases, /ready, the archive."""
CHILD_CONNECTIONS: Final = 3
"""For each of its children: the child's own, those of the job that runs, and of one that is announced."""
DEFAULT_MAXCLIENTS: Final = 10_000
"""Of Redis and Valkey."""
LEAST_PODS: Final = 2
KB: Final = 1024


@dataclass(frozen=True)
class Costs:
    """What was measured.

    Attributes:
        tokens: new ones of a turn.
        turn_cpu_s: of the API, for one turn.
        collect_cpu_s: of API, worker and child, for the collect of a session.
        turn_bytes: of a turn in Redis.
        replay_token_bytes: of a token's routed experts in Redis, for 48 layers of 8 out of 128 experts.
        reply_token_bytes: of a token in a stored result.
        cached_turn_bytes: of a turn in an API process's cache.
    """

    tokens: int
    turn_cpu_s: float
    collect_cpu_s: float
    turn_bytes: float
    replay_token_bytes: float
    reply_token_bytes: float
    cached_turn_bytes: float

    @property
    def session_bytes(self) -> float:
        """Of a whole session in Redis."""
        return TURNS * self.turn_bytes

    @property
    def session_tokens(self) -> int:
        """Of a whole session."""
        return TURNS * self.tokens


@dataclass(frozen=True)
class Size:
    """What so many live sessions take; bytes and CPUs, averaged over a session's life."""

    live: int
    turns_per_s: float
    collects_per_s: float
    api_cpus: float
    api_pods: int
    cache_pods: int
    burst_cpus: float
    worker_pods: int
    live_bytes: float
    result_bytes: float
    retained_bytes: float
    replay_factor: float


def read_costs(results: Path = RESULTS) -> Costs:
    """The figures of `benchmarks/results`. Raises `LookupError` for one that is missing or not unique."""
    turn = _measured(results, "store_bytes", turns=TURNS)
    tokens: int = turn["params"]["new_tokens"]
    return Costs(
        tokens=tokens,
        turn_cpu_s=_measured(results, "chat_cpu", turn=20)["value"] / 1000,
        collect_cpu_s=_measured(results, "collect_cpu", turns=TURNS, new_tokens=tokens)["value"] / 1000,
        turn_bytes=turn["value"] * KB,
        replay_token_bytes=_measured(results, "replay_bytes", "replay_memory", rows="full")["value"],
        reply_token_bytes=_measured(results, "reply_bytes", contract=2)["value"],
        cached_turn_bytes=_measured(results, "live_sessions", "cached_turn", new_tokens=tokens)["value"],
    )


def _measured(results: Path, benchmark: str, name: str = "", **params: Any) -> dict[str, Any]:
    content = json.loads((results / f"{benchmark}.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = [
        measurement
        for measurement in content["measurements"]
        if measurement["name"] == (name or benchmark) and params.items() <= measurement["params"].items()
    ]
    if len(found) != 1:
        raise LookupError(f"{benchmark}.json has {len(found)} measurements of {name or benchmark} {params}")
    return found[0]


def size(live: int, costs: Costs, retention_s: int = limits.RETENTION_S) -> Size:
    """The arithmetic."""
    turns_per_s = live / TURN_S
    collects_per_s = turns_per_s / TURNS
    api_cpus = turns_per_s * costs.turn_cpu_s
    burst_cpus = live * costs.collect_cpu_s / BURST_S
    # A session that lives is half done on average.
    cached = live * TURNS / 2 * costs.cached_turn_bytes
    return Size(
        live=live,
        turns_per_s=turns_per_s,
        collects_per_s=collects_per_s,
        api_cpus=api_cpus,
        api_pods=max(LEAST_PODS, ceil(api_cpus / UTILIZATION)),
        cache_pods=max(LEAST_PODS, ceil(cached / limits.SESSION_CACHE_BYTES)),
        burst_cpus=burst_cpus,
        worker_pods=max(LEAST_PODS, ceil(burst_cpus / CHILDREN)),
        live_bytes=live * costs.session_bytes / 2,
        result_bytes=collects_per_s * limits.RESULT_TTL_S * costs.session_tokens * costs.reply_token_bytes,
        retained_bytes=collects_per_s * retention_s * costs.session_bytes,
        replay_factor=1 + costs.tokens * costs.replay_token_bytes / costs.turn_bytes,
    )


def connections(api_pods: int, worker_pods: int) -> int:
    """To Redis at the most, the queue's included."""
    worker = WORKER_CONNECTIONS + CHILDREN * CHILD_CONNECTIONS
    return api_pods * API_CONNECTIONS + worker_pods * worker


def page(costs: Costs) -> str:
    """The page."""
    sizes = [size(live, costs) for live in LIVE]
    columns: dict[str, list[str]] = {
        "Live sessions": [f"{s.live:,}" for s in sizes],
        "Turns a second": [f"{s.turns_per_s:,.0f}" for s in sizes],
        "API CPUs": [f"{s.api_cpus:,.1f}" for s in sizes],
        "API pods for the CPU": [f"{s.api_pods:,}" for s in sizes],
        "API pods for the cache": [f"{s.cache_pods:,}" for s in sizes],
        "Worker CPUs in a burst": [f"{s.burst_cpus:,.1f}" for s in sizes],
        "Worker pods": [f"{s.worker_pods:,}" for s in sizes],
        "Redis: live sessions": [_bytes(s.live_bytes) for s in sizes],
        "Redis: results": [_bytes(s.result_bytes) for s in sizes],
        "Redis: deleted sessions": [_bytes(s.retained_bytes) for s in sizes],
        "Redis: connections": [f"{connections(s.api_pods, s.worker_pods):,}" for s in sizes],
    }
    least, some, most = sizes
    shortest = size(some.live, costs, limits.RETENTION_MIN_S)
    return f"""# Sizing

<!-- Written by `python -m deploy.sizing`; change the results or the script, not this page. -->

What an installation takes, worked out on paper from what was [measured](../../benchmarks/results/) on two
cores, and from the [limits](limits.md). Nothing here was measured at such a size: take it as a first guess,
and look at the [metrics](../guides/observe.md).

## Measured

| What | Figure | From |
|---|---|---|
| A turn of {costs.tokens} new tokens in Redis | {costs.turn_bytes / KB:.1f} KiB | `store_bytes` |
| Its routed experts (48 layers, 8 of 128) | {costs.replay_token_bytes:.0f} bytes a token | `replay_bytes` |
| A turn, CPU of the API | {costs.turn_cpu_s * 1000:.1f} ms | `chat_cpu`, small turns of cached sessions |
| A collect of {TURNS} turns, CPU of API and worker | {costs.collect_cpu_s * 1000:.0f} ms | `collect_cpu` |
| A turn in an API process's cache | {costs.cached_turn_bytes / KB:.1f} KiB | `live_sessions` |
| A stored result | {costs.reply_token_bytes:.1f} bytes a token | `reply_bytes` |

## Worked out

Sessions of {TURNS} turns of {costs.tokens} new tokens, {costs.session_tokens:,} in all, with a turn every
{TURN_S:g} s: a session lives {TURNS * TURN_S / 60:.0f} minutes, and takes {_bytes(costs.session_bytes)} in
Redis when it ends.

{_table(columns)}

- **API pods for the CPU**: one event loop each, at {UTILIZATION:.0%} of a CPU, and never fewer than
  {LEAST_PODS}.
- **API pods for the cache**: so many that each live session stays in the cache of one pod
  (`SESSION_CACHE_BYTES`), *if* the balancer sends a session to the same pod, by the id in its path. Without
  that, and with fewer pods, a request often meets a pod that has to read the session's whole stream: right,
  but slower, and up to {_bytes(least.turns_per_s * costs.session_bytes / 2)} a second out of Redis for
  {least.live:,} sessions. `tokentape_cache_lookups_total` tells.
- **Worker CPUs in a burst**: all live sessions end together and are collected within {BURST_S:g} s. Spread
  evenly over time, {most.live:,} sessions need {most.collects_per_s * costs.collect_cpu_s:.1f} CPUs. A worker
  pod has {CHILDREN} children, a CPU each. More than {limits.QUEUE_DEPTH:,} collects at once (`QUEUE_DEPTH`)
  are refused with `queue_full`, to be sent again.
- **Redis: deleted sessions** stay for {limits.RETENTION_S / 3600:g} h (`RETENTION_S`), for audits: where
  sessions follow each other all day, they are nearly all of the memory. `--retention-s` is the lever, and
  the figures are linear in it: {some.live:,} live sessions leave {_bytes(some.retained_bytes)}, and
  {_bytes(shortest.retained_bytes)} with the least, {limits.RETENTION_MIN_S / 3600:g} h.
  [How short it may be](../guides/audits.md#how-long-deleted-sessions-stay).
- **Redis: connections**, at the most, which `maxclients` of the server must allow (Redis' own default is
  {DEFAULT_MAXCLIENTS:,}), besides those of replicas and of your tools. An API pod opens one for each command
  that is under way, up to {limits.STORE_CONNECTIONS:,} for sessions (`STORE_CONNECTIONS`), as many for the
  queue, and one for announcements, {API_CONNECTIONS:,} in all; a worker pod needs {connections(0, 1)}. The
  figures are with the API pods for the CPU; with those for the cache {some.live:,} live sessions allow
  {connections(some.cache_pods, some.worker_pods):,}. A rollout has one pod more of either kind. Above
  `maxclients` Redis refuses connections, which is `store_unavailable` after {limits.STORE_RETRY_S:g} s. It
  lowers `maxclients` by itself if it may not open so many files, and says so in its log: `ulimit -n` must be
  above it. In a cluster the figures hold for every node; a [queue apart](../guides/redis.md#the-queue-apart)
  halves them.
- **With routing replay** multiply live and deleted sessions by {least.replay_factor:.0f}.
- One tenant has at most {limits.SESSIONS_PER_TENANT:,} open sessions (`SESSIONS_PER_TENANT`), one API pod at
  most {limits.ENGINE_CONNECTIONS:,} generations at the same time (`ENGINE_CONNECTIONS`).

Redis's own overhead is in the figures for streams; give the server a third more for what it copies while it
rewrites its append-only file.
"""


def _table(columns: dict[str, list[str]]) -> str:
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bytes(count: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.{0 if count >= 10 * factor else 1}f} {unit}"
    return f"{count / 1e3:.0f} KB"


def main() -> int:
    """Writes or checks the page; 1 if --check found that it is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    text = page(read_costs())
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print("docs/reference/sizing.md is not current: run python -m deploy.sizing", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print("wrote docs/reference/sizing.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
