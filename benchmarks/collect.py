"""Collects: what they cost, and how long they take."""

import asyncio
import statistics
import time
from collections.abc import Iterator

import httpx

from benchmarks.measure import Measurement, cpu_seconds
from benchmarks.system import NEW_TOKENS, WARM_UP, collect, system

CLIENTS = 16
SECONDS = 5.0


def collect_cpu() -> Iterator[Measurement]:
    """What CPU time does one collect cost, over API, worker and child process?"""
    costs = {}
    with system() as running, httpx.Client(timeout=60.0, trust_env=False) as client:
        for turns, rounds in ((10, 100), (100, 40)):
            session = running.record(turns, seed=turns)
            for number in range(WARM_UP):
                collect(client, session, number)
            runs = []
            for run in range(5):
                began = cpu_seconds(*running.pids)
                for number in range(rounds):
                    collect(client, session, WARM_UP + run * rounds + number)
                runs.append((cpu_seconds(*running.pids) - began) / rounds * 1000)
            costs[turns] = statistics.median(runs)
            params = {"turns": turns, "new_tokens": NEW_TOKENS, "collects": rounds, "runs": len(runs)}
            limit = 50.0 if turns == 100 else None
            yield Measurement("collect_cpu", costs[turns], "ms", params, limit)
    yield Measurement("collect_cpu_ratio", costs[100] / costs[10], "x", {"turns": [100, 10]}, 12.0)


def collect_latency() -> Iterator[Measurement]:
    """How long does a collect of 10 turns take on an idle worker, from POST to reply?"""
    with system() as running, httpx.Client(timeout=60.0, trust_env=False) as client:
        session = running.record(10, seed=1)
        times = []
        for number in range(WARM_UP + 100):
            time.sleep(0.02)  # the worker goes back to waiting
            began = time.perf_counter()
            collect(client, session, number)
            times.append((time.perf_counter() - began) * 1000)
    times = sorted(times[WARM_UP:])
    params = {"turns": 10, "collects": len(times)}
    yield Measurement("collect_latency_p50", statistics.median(times), "ms", params, 20.0)
    yield Measurement("collect_latency_p90", times[int(len(times) * 0.9)], "ms", params)


def collect_throughput() -> Iterator[Measurement]:
    """How many small collects per second does one worker process finish, saturated?"""
    with system() as running:
        sessions = running.copies(running.record(2, seed=1), CLIENTS)
        rates = [asyncio.run(_throughput(sessions, run)) for run in range(4)][1:]
    params = {
        "turns": 2,
        "new_tokens": NEW_TOKENS,
        "clients": CLIENTS,
        "seconds": SECONDS,
        "runs": len(rates),
    }
    yield Measurement("collect_throughput", statistics.median(rates), "1/s", params, at_least=200.0)


async def _throughput(sessions: list[str], run: int) -> float:
    end = time.perf_counter() + SECONDS

    async def repeat(client: httpx.AsyncClient, session: str) -> int:
        done = 0
        while time.perf_counter() < end:
            body = {"max_seq_len": 1_000_000 * (run + 1) + done}
            (await client.post(f"{session}/samples", json=body)).raise_for_status()
            done += 1
        return done

    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        return sum(await asyncio.gather(*(repeat(client, session) for session in sessions))) / SECONDS
