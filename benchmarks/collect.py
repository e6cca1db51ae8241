"""Collects: what they cost, and how long they take."""

import asyncio
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Measurement, cpu_seconds
from tests.support.processes import fleet
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts.events import SessionOpened, TurnRecorded
from tokentape_core.store import RedisStore, connect
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

NEW_TOKENS = 514
SAMPLED = 450
"""Of the new tokens of a turn; the others came from the environment and the template."""
WARM_UP = 5


@dataclass
class System:
    """One API and one worker process on a server of their own."""

    url: str
    redis_url: str
    pids: tuple[int, ...]
    renderer: ChatRenderer

    def record(self, turns: int, seed: int) -> str:
        """Writes a session of so many turns, as the API would have; returns its URL."""
        return asyncio.run(self._record(turns, seed))

    async def _record(self, turns: int, seed: int) -> str:
        draw = np.random.default_rng(seed)
        tokenizer = self.renderer.tokenizer
        # As the template writes a turn without reasoning, so that the recording is what it would write.
        think, end = tokenizer.encode("<think>\n\n</think>\n\n"), tokenizer.encode("<|im_end|>")
        plain = SAMPLED - len(think) - len(end)
        session_id = uuid.uuid4().hex
        client = connect(self.redis_url)
        store = RedisStore(client)
        await store.open(
            session_id,
            SessionOpened(
                id=uuid.uuid4().hex,
                mode="linear",
                matcher="strict",
                family="qwen3",
                max_trim_tokens=0,
                template=self.renderer.fingerprint,
                labels={},
                pins={},
                opened_at=0.0,
            ),
        )
        parent, answer = np.empty(0, np.int32), None
        for seq in range(1, turns + 1):
            # Without the lowest ids, single bytes: text is what a model mostly writes.
            text = draw.integers(1000, 4000, plain).tolist()
            output = [*think, *text, *end]
            user = {"role": "user", "content": ""}
            while len(suffix := self._suffix(parent, answer, user)) < NEW_TOKENS - SAMPLED:
                user["content"] += " word"
            answer = {"role": "assistant", "content": tokenizer.decode(text)}
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
                request={"temperature": 1.0},
                reply={"choices": [{}]},
                meta={"prompt_tokens": len(parent), "cached_tokens": len(parent), "weight_version": "1"},
                requested_at=float(seq),
                committed_at=seq + 0.5,
            )
            await store.append(session_id, seq, event)
            parent = np.concatenate([parent, suffix, event.output])
        await client.aclose()
        return f"{self.url}/sessions/{session_id}"

    def _suffix(
        self, parent: NDArray[np.int32], answer: dict[str, str] | None, user: dict[str, str]
    ) -> NDArray[np.int32]:
        if answer is None:
            return self.renderer.render([user])
        return self.renderer.extend(parent, answer, [user]).suffix


@contextmanager
def system() -> Iterator[System]:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    with tempfile.TemporaryDirectory() as directory, EmbeddedValkey() as valkey:
        tokenizer.save_pretrained(f"{directory}/tokenizer")
        with fleet(
            valkey.url, "http://127.0.0.1:1", Path(f"{directory}/tokenizer"), Path(directory)
        ) as running:
            api, url = running.api()
            assembler = running.assembler()
            pids = (api.process.pid, assembler.process.pid)
            yield System(url, valkey.url, pids, ChatRenderer(Tokenizer(tokenizer), get_family("qwen3")))


def _collect(client: httpx.Client, session: str, number: int) -> int:
    """One collect that no earlier result can answer; the reply's bytes."""
    reply = client.post(
        f"{session}/samples", json={"max_seq_len": 1_000_000 + number}, headers={"Accept-Contract": "2"}
    )
    reply.raise_for_status()
    return len(reply.content)


def collect_cpu() -> Iterator[Measurement]:
    """What CPU time does one collect cost, over API, worker and child process?"""
    costs = {}
    with system() as running, httpx.Client(timeout=60.0, trust_env=False) as client:
        for turns, rounds in ((10, 100), (100, 40)):
            session = running.record(turns, seed=turns)
            for number in range(WARM_UP):
                _collect(client, session, number)
            runs = []
            for run in range(5):
                began = cpu_seconds(*running.pids)
                for number in range(rounds):
                    _collect(client, session, WARM_UP + run * rounds + number)
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
            _collect(client, session, number)
            times.append((time.perf_counter() - began) * 1000)
    times = sorted(times[WARM_UP:])
    params = {"turns": 10, "collects": len(times)}
    yield Measurement("collect_latency_p50", statistics.median(times), "ms", params, 20.0)
    yield Measurement("collect_latency_p90", times[int(len(times) * 0.9)], "ms", params)
