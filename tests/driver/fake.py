"""A server for the driver to talk to, a trainer's sample class, and the payloads between them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx
import numpy as np

from tokentape_contracts.samples import Sample, Status, encode_samples

BASE_URL = "http://tape.test:8080"
TOKENS = [5, 6, 7, 8, 9]


NO_ACCOUNTING: Any = object()


def payload(
    *, contract: int = 2, empty_reason: str | None = None, accounting: Any = NO_ACCOUNTING, **changes: Any
) -> bytes:
    """A samples reply with one sample, or none if `empty_reason` is given.

    Args:
        accounting: what the session's metadata says of it; without it the server counts nothing.
    """
    fields: dict[str, Any] = {
        "tokens": np.array(TOKENS),
        "response": "abc",
        "response_length": 3,
        "loss_mask": np.array([1, 0, 1]),
        "rollout_log_probs": np.array([-0.5, 0.0, -0.1234567891234567]),
        "rollout_routed_experts": np.arange(16, dtype=np.int32).reshape(4, 2, 2),
        "status": Status.TRUNCATED,
        "weight_versions": ["3", "4"],
        "prefix_cache_info": {"cached_tokens": 2, "total_prompt_tokens": 6},
        "spec_info": {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 9, "completion_tokens": 4},
        "metadata": {"lifecycle": [{"turn": 1}, {"turn": 2}]},
        **changes,
    }
    samples = [] if empty_reason else [Sample(**fields)]
    session = {"accumulated_token_ids": np.array(TOKENS), "max_trim_tokens": 1, "shared": "session"}
    if accounting is not NO_ACCOUNTING:
        session["accounting"] = accounting
    return encode_samples(samples, session, empty_reason, contract=contract)


def reply_of(body: bytes, *, contract: int = 2, **headers: str) -> httpx.Response:
    """The 200 that carries a payload."""
    digest = f"sha-256={hashlib.sha256(body).hexdigest()}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(
        200,
        content=body,
        headers={"Tokentape-Contract": str(contract), "Tokentape-Digest": digest, **named},
    )


Reply = httpx.Response | Exception | Callable[[httpx.Request], Awaitable[httpx.Response]]


@dataclass
class FakeServer:
    """Answers like a server, by way of `httpx.MockTransport`, and keeps the requests."""

    samples: Reply = field(default_factory=lambda: reply_of(payload()))
    delete: Reply = field(default_factory=lambda: httpx.Response(204))
    open: Reply = field(default_factory=lambda: httpx.Response(200, json={"session_id": "s1"}))
    requests: list[httpx.Request] = field(default_factory=list)
    collecting: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a samples request has come."""

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    @property
    def calls(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]

    @property
    def posted(self) -> httpx.Request:
        [request] = [r for r in self.requests if r.url.path.endswith("/samples")]
        return request

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "DELETE":
            reply = self.delete
        else:
            collects = request.url.path.endswith("/samples")
            reply = self.samples if collects else self.open
            if collects:
                self.collecting.set()
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, httpx.Response) else await reply(request)


async def hang(request: httpx.Request) -> httpx.Response:
    """A reply that never comes."""
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class TrainerSample:
    """What a trainer's own class looks like: many fields that are none of ours, a nested enum, counters."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        def to_dict(self) -> dict[str, int]:
            return dict(self.__dict__)

        @staticmethod
        def from_dict(data: dict[str, int]) -> "TrainerSample.PrefixCacheInfo":
            return TrainerSample.PrefixCacheInfo(
                data.get("cached_tokens", 0), data.get("total_prompt_tokens", 0)
            )

    @dataclass
    class SpecInfo:
        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        def to_dict(self) -> dict[str, int]:
            return dict(self.__dict__)

        @staticmethod
        def from_dict(data: dict[str, int]) -> "TrainerSample.SpecInfo":
            info = TrainerSample.SpecInfo()
            for name in info.__dict__:
                setattr(info, name, data.get(name, 0))
            return info

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)


Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(on_samples: Connection) -> AsyncIterator[tuple[str, list[str]]]:
    """A real socket: opens and deletes sessions properly, and hands a samples request to `on_samples`.

    Gives the base URL and the request lines that came.
    """
    lines: list[str] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line = head.splitlines()[0].rsplit(" ", 1)[0]
            lines.append(line)
            if line.endswith("/samples"):
                await on_samples(reader, writer)
            elif line.startswith("DELETE"):
                writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            else:
                body = b'{"session_id": "s1"}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(body), body)
                )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the driver hung up, as some tests want
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}", lines
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
