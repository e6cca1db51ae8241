"""Stalls: does one session's work delay another's request?

`GET /health` is polled every 5 ms from a process of its own, first alone and then beside the work. The API
and the poll have one CPU, the worker, Redis, the engine and the client the others, as pods have: else the
figure is that of the kernel's scheduler, which lets a request wait where two CPUs are wanted by three.
"""

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.measure import Measurement
from benchmarks.system import LAYERS, NEW_TOKENS, TOPK, WARM_UP, System, collect, system
from tokentape_contracts import limits

SECONDS = 6
ROUNDS = 3
TURNS = 100
REPLAY_ROWS = 65_536
"""Of 48 layers × top-8 in int32, as SGLang sends them, these are 100 MB."""


def loop_stall() -> Iterator[Measurement]:
    """How late does `GET /health` come while collects of 51,400 tokens run back to back?"""
    for replay in (False, True):
        with system() as running, httpx.Client(timeout=60.0, trust_env=False) as client:
            session = running.record(TURNS, seed=1, replay=replay)
            collects = (collect(client, session, number) for number in range(1_000_000))
            for _ in range(WARM_UP):
                next(collects)
            params = {"turns": TURNS, "new_tokens": NEW_TOKENS, "replay": replay}
            yield from _stall("loop_stall", running, collects, params, 2.0)


def replay_stall() -> Iterator[Measurement]:
    """How late does `GET /health` come while turns with 100 MB of routing replay rows are recorded?"""
    options = ("--replay", "full", "--replay-layers", str(LAYERS))
    with system(*options) as running, httpx.Client(timeout=120.0, trust_env=False) as client:
        session = client.post(f"{running.url}/sessions").json()["session_id"]
        url = f"{running.url}/sessions/{session}/v1/chat/completions"
        messages = [{"role": "user", "content": "word " * REPLAY_ROWS}]

        def chat() -> dict[str, Any]:
            reply = client.post(url, json={"messages": messages, "max_tokens": 32}).raise_for_status()
            choice: dict[str, Any] = reply.json()["choices"][0]
            return choice

        messages += [chat()["message"], {"role": "user", "content": "go on"}]
        turns = (chat()["meta_info"]["prompt_tokens"] for _ in range(limits.TURNS_PER_SESSION))
        params = {"rows": next(turns), "layers": LAYERS, "topk": TOPK}
        yield from _stall("replay_stall", running, turns, params)


def _stall(
    name: str, running: System, work: Iterator[object], params: dict[str, Any], at_most: float | None = None
) -> Iterator[Measurement]:
    """The p99 idle and beside the work, each the median over rounds, and their ratio."""
    running.pin()
    idle, busy = [], []
    done = 0
    for _ in range(ROUNDS):
        idle.append(_p99(_poll(running.url)))
        with _repeating(work) as count:
            busy.append(_p99(_poll(running.url)))
        done += len(count)
    params = {**params, "rounds": ROUNDS, "seconds": SECONDS}
    yield Measurement(f"{name}_idle_p99", statistics.median(idle), "ms", params)
    yield Measurement(f"{name}_busy_p99", statistics.median(busy), "ms", {**params, "done": done})
    ratio = statistics.median(b / i for b, i in zip(busy, idle, strict=True))
    yield Measurement(name, ratio, "x", params, at_most)


def _poll(url: str) -> list[float]:
    command = ["taskset", "--cpu-list", "0", sys.executable, "-m", "benchmarks.poll", url, str(SECONDS)]
    times: list[float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return times


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


@contextmanager
def _repeating(work: Iterator[object]) -> Iterator[list[object]]:
    """Does the work again and again in a thread until the block ends; yields what it gave."""
    done: list[object] = []
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            done.append(next(work))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
