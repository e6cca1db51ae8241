"""Collects: what they cost, and how long they take."""

import asyncio
import statistics
import time
from collections.abc import Iterator

import httpx
import psutil

from benchmarks.measure import Measurement, cpu_seconds
from benchmarks.system import NEW_TOKENS, WARM_UP, collect, system
from tokentape_api.collect import enqueue
from tokentape_contracts import keys
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.jobs import AssembleJob
from tokentape_core.domain.state import turn_id
from tokentape_core.store import connect

CLIENTS = 16
SECONDS = 5.0
CHILDREN = (2, 4)
"""As in deploy/kustomize, and enough to keep the worker process itself busy: a child also waits for Redis."""
JOBS = 400
"""Below `limits.QUEUE_READ`."""
MOST_S = 60.0


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
    """How many small collects per second does one worker process finish, saturated?

    Its queue is filled while it is stopped: on two CPUs, clients and an API process that ask fast enough take
    most of what the worker is measured with. What comes through all of them is told too.
    """
    for children in CHILDREN:
        params = {"turns": 2, "new_tokens": NEW_TOKENS, "children": children}
        with system(worker_options=("--workers", str(children))) as running:
            sessions = running.copies(running.record(2, seed=1), CLIENTS)
            worker = psutil.Process(running.pids[1])
            rates = [asyncio.run(_drained(running.redis_url, worker, sessions, run)) for run in range(4)][1:]
            run_params = {**params, "jobs": JOBS, "runs": len(rates)}
            limit = 200.0 if children == max(CHILDREN) else None
            rate = statistics.median(rates)
            yield Measurement("collect_throughput", rate, "1/s", run_params, at_least=limit)
            rates = [asyncio.run(_over_http(sessions, run)) for run in range(4)][1:]
            run_params = {**params, "clients": CLIENTS, "seconds": SECONDS, "runs": len(rates)}
            yield Measurement("collect_throughput_over_http", statistics.median(rates), "1/s", run_params)


async def _drained(redis_url: str, worker: psutil.Process, sessions: list[str], run: int) -> float:
    """Jobs per second of a worker that finds the queue full."""
    client = connect(redis_url)
    worker.suspend()
    for number in range(JOBS):
        session_id = sessions[number % len(sessions)].rpartition("/")[2]
        wanted = SamplesRequest(max_seq_len=JOBS * (run + 1) + number)
        tail = turn_id(2)
        job = AssembleJob(session_id, tail, wanted.digest(tail, 2), 2, wanted.max_seq_len, wanted.metadata)
        await client.zadd(keys.waiters(session_id, job.request), {"benchmark": time.time() + 60})
        await enqueue(client, job, 60.0)
    worker.resume()
    began = time.perf_counter()
    done = 0
    while done < JOBS:
        await asyncio.sleep(0.02)
        done = await client.xlen(keys.replies("benchmark"))
        if time.perf_counter() - began > MOST_S:
            raise TimeoutError(f"{done} of {JOBS} jobs were announced within {MOST_S:g} s")
    seconds = time.perf_counter() - began
    await client.delete(keys.replies("benchmark"))
    await client.aclose()
    return JOBS / seconds


async def _over_http(sessions: list[str], run: int) -> float:
    """Collects per second of one API and one worker process, which share their CPUs with the clients."""
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
