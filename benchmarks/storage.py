"""Bytes: what a session takes in Redis, in the API's memory, and on the way to the driver."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.measure import Measurement
from benchmarks.system import NEW_TOKENS, collect, system
from tokentape_contracts import keys
from tokentape_core.store import connect

CONTRACT_LIMITS = {1: 26.0, 2: 19.0}


def store_bytes() -> Iterator[Measurement]:
    """How many bytes does a turn of 514 new tokens take in Redis, and does it grow with its number?"""
    with system() as running:
        used = {
            turns: _memory(running.redis_url, running.record(turns, seed=1)) for turns in (10, 20, 90, 100)
        }
    params = {"new_tokens": NEW_TOKENS, "turns": 100}
    yield Measurement("store_bytes", used[100] / 100 / 1024, "KB/turn", params, 12.0)
    growth = (used[100] - used[90]) / (used[20] - used[10])
    yield Measurement("store_bytes_growth", growth, "x", {**params, "turns": [[90, 100], [10, 20]]}, 1.1)


def _memory(url: str, session: str) -> int:
    async def ask() -> int:
        client = connect(url)
        key = keys.events(urlsplit(session).path.rpartition("/")[2])
        used: int = await client.memory_usage(key, samples=0)
        await client.aclose()
        return used

    return asyncio.run(ask())


def reply_bytes() -> Iterator[Measurement]:
    """How many bytes per token does a collect of 100 turns send, without routing replay rows?"""
    with system() as running, httpx.Client(timeout=60.0, trust_env=False) as client:
        session = running.record(100, seed=1)
        for contract, limit in CONTRACT_LIMITS.items():
            size = collect(client, session, 1, contract=contract)
            params = {"turns": 100, "new_tokens": NEW_TOKENS, "contract": contract}
            yield Measurement("reply_bytes", size / (100 * NEW_TOKENS), "bytes/token", params, limit)


def live_sessions() -> Iterator[Measurement]:
    """How much memory does a live session take of the API's cache, against what is counted, and beyond it?"""
    # A session of 20 turns of 514 tokens takes about 250 KB. 1,200 of them fill the cache of 256 MiB, and
    # the allocator fills its gaps while as many again come and go.
    steps, turns = (50, 850, 3200, 4800), 20
    with system() as running, httpx.Client(timeout=60.0, trust_env=False) as client:
        api = psutil.Process(running.pids[0])
        template = running.record(turns, seed=1)
        resident, counted = [], []
        done = 0
        for step in steps:
            for session in running.copies(template, step - done):
                client.get(session, params={"view": "events"}).raise_for_status()
            done = step
            resident.append(api.memory_info().rss)
            counted.append(_cache_bytes(client, running.url))
    params = {"sessions": list(steps[2:]), "turns": turns, "new_tokens": NEW_TOKENS}
    yield Measurement("api_resident", resident[-1] / 2**20, "MiB", {**params, "sessions": steps[-1]})
    within = {**params, "sessions": list(steps[:2])}
    taken, charged = resident[1] - resident[0], counted[1] - counted[0]
    yield Measurement("cached_turn", charged / (steps[1] - steps[0]) / turns, "bytes", within)
    yield Measurement("cache_charge", taken / charged, "x real", within, 1.2)
    grown = (resident[3] - resident[2]) / (steps[3] - steps[2])
    yield Measurement("live_sessions", grown / 1024, "KB/session", params, 1.0)


def _cache_bytes(client: httpx.Client, url: str) -> float:
    """What an API process says that its cache takes."""
    metrics = client.get(f"{url}/metrics").text
    [line] = [line for line in metrics.splitlines() if line.startswith("tokentape_cache_bytes ")]
    return float(line.split()[1])
