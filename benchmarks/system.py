"""A running system to measure: processes on a server of their own, and sessions to collect."""

import argparse
import asyncio
import inspect
import os
import tempfile
import typing
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray

from tests.support.processes import Fleet, fleet, free_port, wait_for
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.events import ReplaySpec, SessionOpened, TurnRecorded
from tokentape_core.domain.replay import Rows, deduplicate
from tokentape_core.store import RedisStore, connect
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

NEW_TOKENS = 514
SAMPLED = 450
"""Of the new tokens of a turn; the others came from the environment and the template."""
LAYERS, TOPK, EXPERTS = 48, 8, 128
"""The routing of a Qwen3-30B-A3B."""
KIND = "routed_experts"
SPEC = ReplaySpec(rows="incremental", layers=LAYERS, prefix="latest")
WARM_UP = 5


@dataclass
class System:
    """One API and one worker process on a server of their own."""

    url: str
    redis_url: str
    engine_url: str
    pids: tuple[int, ...]
    renderer: ChatRenderer
    fleet: Fleet

    def bare(self) -> "System":
        """The same with `benchmarks.bare` in the API's place."""
        port = free_port()
        addresses = ("--engine-url", self.engine_url, "--redis-url", self.redis_url)
        process = self.fleet.start("bare", "benchmarks.bare", "--port", str(port), *addresses)
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", process)
        return replace(self, url=url, pids=(process.process.pid,))

    def pin(self) -> None:
        """Gives the API process the first CPU, and this process and all its other children the rest."""
        rest = list(range(1, os.cpu_count() or 1)) or [0]
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, [0] if process.pid == self.pids[0] else rest)

    def record(self, turns: int, seed: int, *, replay: bool = False) -> str:
        """Writes a session of so many turns, as the API would have; returns its URL."""
        return asyncio.run(self._record(turns, seed, replay))

    async def _record(self, turns: int, seed: int, replay: bool) -> str:
        draw = np.random.default_rng(seed)
        tokenizer = self.renderer.tokenizer
        # As the template writes a turn without reasoning, so that the recording is what it would write.
        think, end = tokenizer.encode("<think>\n\n</think>\n\n"), tokenizer.encode("<|im_end|>")
        plain = SAMPLED - len(think) - len(end)
        # What a model writes is text: here the standard library's, from a random place on.
        pool = tokenizer.encode(inspect.getsource(argparse) + inspect.getsource(typing))
        session_id = uuid.uuid4().hex
        client = connect(self.redis_url)
        store = RedisStore(client)
        await store.open(
            session_id,
            SessionOpened(
                id=uuid.uuid4().hex,
                mode="linear",
                matcher="strict",
                altered_answer="refuse",
                family="qwen3",
                max_trim_tokens=0,
                template=self.renderer.fingerprint,
                labels={},
                pins={},
                replay={KIND: SPEC} if replay else {},
                tenant="",
                opened_at=0.0,
            ),
        )
        parent, answer = np.empty(0, np.int32), None
        for seq in range(1, turns + 1):
            start = int(draw.integers(0, len(pool) - plain))
            text = pool[start : start + plain]
            output = [*think, *text, *end]
            user = {"role": "user", "content": ""}
            while len(suffix := self._suffix(parent, answer, user)) < NEW_TOKENS - SAMPLED:
                user["content"] += " word"
            answer = {"role": "assistant", "content": tokenizer.decode(text)}
            first = max(len(parent) - 1, 0)
            shape = (len(parent) + len(suffix) + SAMPLED - 1 - first, LAYERS, TOPK)
            rows = Rows(first, draw.integers(0, EXPERTS, shape, np.uint8))
            blob, data = deduplicate(rows, None, KIND, {}, limits.STORE_VALUE_BYTES)
            event = TurnRecorded(
                id=uuid.uuid4().hex,
                parent=seq - 1,
                keep=len(parent),
                suffix=suffix,
                output=np.array(output, np.int32),
                logprobs=-draw.exponential(1.0, SAMPLED),
                finish="stop",
                response_id=f"r{seq}",
                messages=[user, answer],
                tools=None,
                altered=[],
                request={"temperature": 1.0},
                reply={"choices": [{}]},
                replay={KIND: blob} if replay else {},
                meta={"prompt_tokens": len(parent), "cached_tokens": len(parent), "weight_version": "1"},
                requested_at=float(seq),
                committed_at=seq + 0.5,
            )
            await store.append(session_id, seq, event, {KIND: data} if replay else {})
            parent = np.concatenate([parent, suffix, event.output])
        await client.aclose()
        return f"{self.url}/sessions/{session_id}"

    def copies(self, session: str, count: int) -> list[str]:
        """So many sessions with the same events; their URLs."""
        return asyncio.run(self._copies(session, count))

    async def _copies(self, session: str, count: int) -> list[str]:
        client = connect(self.redis_url)
        dumped = await client.dump(keys.events(session.rpartition("/")[2]))
        ids = [uuid.uuid4().hex for _ in range(count)]
        for session_id in ids:
            await client.restore(keys.events(session_id), limits.SESSION_IDLE_S * 1000, dumped)
        await client.aclose()
        return [f"{self.url}/sessions/{session_id}" for session_id in ids]

    def _suffix(
        self, parent: NDArray[np.int32], answer: dict[str, str] | None, user: dict[str, str]
    ) -> NDArray[np.int32]:
        if answer is None:
            return self.renderer.render([user])
        return self.renderer.extend(parent, answer, [user]).suffix


@contextmanager
def system(
    *api_options: str, engine_options: tuple[str, ...] = (), worker_options: tuple[str, ...] = ()
) -> Iterator[System]:
    """One API and one worker process, and an engine that costs nothing.

    Args:
        api_options: further options of the API.
        engine_options: further options of `benchmarks.engine`.
        worker_options: further options of the worker.
    """
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    with tempfile.TemporaryDirectory() as directory, EmbeddedValkey() as valkey:
        tokenizer.save_pretrained(f"{directory}/tokenizer")
        folder, port = Path(directory), free_port()
        renderer = ChatRenderer(Tokenizer(tokenizer), get_family("qwen3"))
        with fleet(valkey.url, f"http://127.0.0.1:{port}", folder / "tokenizer", folder) as running:
            (end,) = renderer.tokenizer.encode("<|im_end|>")
            engine = running.start(
                "engine", "benchmarks.engine", "--port", str(port), "--end", str(end), *engine_options
            )
            wait_for(f"{running.engine_url}/health", engine)
            api, url = running.api(*api_options)
            assembler = running.assembler(*worker_options)
            pids = api.process.pid, assembler.process.pid
            yield System(url, valkey.url, running.engine_url, pids, renderer, running)


def collect(client: httpx.Client, session: str, number: int, *, contract: int = 2) -> int:
    """One collect that no earlier result can answer; the reply's bytes."""
    reply = client.post(
        f"{session}/samples",
        json={"max_seq_len": 1_000_000 + number},
        headers={"Accept-Contract": str(contract)},
    )
    reply.raise_for_status()
    return len(reply.content)
