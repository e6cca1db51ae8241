"""Routing replay rows: what they take in Redis."""

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np

from benchmarks.measure import Measurement
from benchmarks.system import EXPERTS, LAYERS, SAMPLED, TOPK, system
from tokentape_contracts import keys
from tokentape_core.store import connect

TURNS = 20


def replay_bytes() -> Iterator[Measurement]:
    """How many bytes per new token are stored if the engine sends the rows of all tokens with every turn?"""
    for rows, limit in (("full", 400.0), ("incremental", 400.0)):
        options = ("--replay", rows, "--replay-layers", str(LAYERS))
        with system(*options) as running, httpx.Client(timeout=120.0, trust_env=False) as client:
            session = client.post(f"{running.url}/sessions").json()["session_id"]
            messages: list[dict[str, str]] = []
            stored, tokens = [0], [0]
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"{turn}" + " word" * 55})
                reply = client.post(
                    f"{running.url}/sessions/{session}/v1/chat/completions",
                    json={"messages": messages, "max_tokens": SAMPLED},
                ).raise_for_status()
                messages.append(reply.json()["choices"][0]["message"])
                meta = reply.json()["choices"][0]["meta_info"]
                tokens.append(meta["prompt_tokens"] + meta["completion_tokens"])
                stored.append(asyncio.run(_stored(running.redis_url, session)))
            new_bytes, new_tokens = np.diff(stored), np.diff(tokens)
            growth = float(new_bytes[-1] / new_tokens[-1] / (new_bytes[1] / new_tokens[1]))
            params = {"rows": rows, "layers": LAYERS, "topk": TOPK, "experts": EXPERTS, "turns": TURNS}
            total = {**params, "tokens": tokens[-1]}
            yield Measurement("replay_bytes", stored[-1] / tokens[-1], "bytes/token", total, limit)
            yield Measurement("replay_bytes_growth", growth, "x", params, 1.05)
            memory = asyncio.run(_memory(running.redis_url, session))
            yield Measurement("replay_memory", memory / tokens[-1], "bytes/token", params)


async def _stored(url: str, session: str) -> int:
    """Bytes of all values that the session's routing replay rows take."""
    client = connect(url)
    key = keys.blobs(session)
    total = 0
    for field in await client.hkeys(key):
        total += len(field) + await client.hstrlen(key, field)
    await client.aclose()
    return total


async def _memory(url: str, session: str) -> int:
    """What the server says that the key takes, its allocator's rounding included."""
    client = connect(url)
    used: int = await client.memory_usage(keys.blobs(session), samples=0)
    await client.aclose()
    return used
