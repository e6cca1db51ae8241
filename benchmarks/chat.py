"""Chats: what a turn costs the API, and how much later it comes than from the engine itself."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.measure import Measurement, cpu_seconds
from benchmarks.system import System, system

SESSIONS = 32
TURNS = 102
WINDOW = 5
"""Turns of every session over which CPU time is taken, around the turn that is meant."""
ENGINE_S = 0.03
RATE = 27.0
REQUESTS = 800
REPLY_TOKENS = 32


@dataclass
class Agent:
    """One conversation, which grows by a small turn at each call."""

    client: httpx.AsyncClient
    url: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self) -> None:
        self.messages.append({"role": "user", "content": f"And then, after {len(self.messages)}?"})
        body = {"model": "m", "messages": self.messages, "max_tokens": REPLY_TOKENS}
        reply = (await self.client.post(self.url, json=body)).raise_for_status()
        self.messages.append(reply.json()["choices"][0]["message"])


async def _agents(client: httpx.AsyncClient, running: System, count: int) -> list[Agent]:
    sessions = [(await client.post(f"{running.url}/sessions")).json()["session_id"] for _ in range(count)]
    return [Agent(client, f"{running.url}/sessions/{sid}/v1/chat/completions") for sid in sessions]


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60.0, trust_env=False, limits=httpx.Limits(max_connections=100))


def chat_cpu() -> Iterator[Measurement]:
    """What CPU time does a chat turn cost the API, with 32 sessions and small turns?"""
    with system() as running:
        costs = asyncio.run(_chat_cpu(running, (10, 20, 100)))
        bare = asyncio.run(_chat_cpu(running.bare(), (20,)))
    params = {"sessions": SESSIONS, "reply_tokens": REPLY_TOKENS, "turns_around": WINDOW}
    for turn, limit in ((10, None), (20, 3.0), (100, None)):
        yield Measurement("chat_cpu", costs[turn], "ms", {**params, "turn": turn}, limit)
    yield Measurement("chat_cpu_bare", bare[20], "ms", {**params, "turn": 20})
    yield Measurement("chat_cpu_ratio", costs[100] / costs[10], "x", {**params, "turns": [100, 10]}, 1.5)


async def _chat_cpu(running: System, turns: Sequence[int]) -> dict[int, float]:
    costs = {}
    api = running.pids[0]
    async with _client() as client:
        agents = await _agents(client, running, SESSIONS)
        done = 0
        for turn in turns:
            while done < turn - 1 - WINDOW // 2:
                await asyncio.gather(*(agent.turn() for agent in agents))
                done += 1
            began = cpu_seconds(api)
            for _ in range(WINDOW):
                await asyncio.gather(*(agent.turn() for agent in agents))
            done += WINDOW
            costs[turn] = (cpu_seconds(api) - began) / (WINDOW * SESSIONS) * 1000
    return costs


def chat_added() -> Iterator[Measurement]:
    """How much later than from the engine itself does a chat turn come, at 27 requests per second?"""
    with system(engine_options=("--latency-s", str(ENGINE_S))) as running:
        direct = asyncio.run(_direct(running))
        through = asyncio.run(_through(running))
        bare = asyncio.run(_through(running.bare()))
    params = {"rate": RATE, "requests": REQUESTS, "engine_ms": ENGINE_S * 1000, "sessions": SESSIONS}
    for name, part, limit in (("p50", 0.5, 5.0), ("p99", 0.99, 30.0)):
        added = _quantile(through, part) - _quantile(direct, part)
        yield Measurement(f"chat_added_{name}", added, "ms", params, limit)
    added = _quantile(bare, 0.5) - _quantile(direct, 0.5)
    yield Measurement("chat_added_bare_p50", added, "ms", params)


async def _direct(running: System) -> list[float]:
    """Latencies of the engine itself."""
    async with _client() as client:
        body = {
            "model": "m",
            "messages": [],
            "input_ids": list(range(1000, 1200)),
            "max_tokens": REPLY_TOKENS,
        }

        async def ask_engine() -> None:
            url = f"{running.engine_url}/v1/chat/completions"
            (await client.post(url, json=body)).raise_for_status()

        await _paced([ask_engine] * 100)
        return await _paced([ask_engine] * REQUESTS)


async def _through(running: System) -> list[float]:
    """Latencies of chat turns."""
    async with _client() as client:
        agents = await _agents(client, running, SESSIONS)
        # One request of a session at a time, as agents do: at this rate a session is asked once a second.
        calls = [agents[number % SESSIONS].turn for number in range(REQUESTS)]
        await _paced(calls[:100])
        return await _paced(calls)


async def _paced(calls: list[Any]) -> list[float]:
    """Starts the calls at `RATE`, whatever became of the earlier ones; their latencies in ms."""

    async def timed(call: Any) -> float:
        began = time.perf_counter()
        await call()
        return (time.perf_counter() - began) * 1000

    tasks = []
    start = time.perf_counter()
    for number, call in enumerate(calls):
        await asyncio.sleep(max(0.0, start + number / RATE - time.perf_counter()))
        tasks.append(asyncio.create_task(timed(call)))
    return list(await asyncio.gather(*tasks))


def _quantile(times: list[float], part: float) -> float:
    if part == 0.5:
        return statistics.median(times)
    return sorted(times)[int(len(times) * part)]
