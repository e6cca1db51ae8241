"""Agents and drivers, as they come: many at once, over all API processes, and not easily discouraged.

An agent behaves like OpenAI's SDK: it sends a request again after a lost connection, and after an error
unless `x-should-retry` forbids it, each time to the next API process, as behind a load balancer. Some agents
stream. Some sessions are opened, collected and deleted by the real driver, the others by plain HTTP, which
can do what the driver does not: collect in the middle, or send the same again.
"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import httpx
import orjson

from tests.faults.driver import Driver
from tests.faults.history import COLLECT_S, Call, History, Kind
from tests.faults.hooks import FAULT, MEETING
from tests.faults.replies import read
from tokentape_driver.session import Session

CALL_S: Final = 25.0
"""Any request's deadline: the store's retries (10 s) and a socket timeout, with room for a busy machine."""
_TURN_S: Final = 60.0
"""An agent that gets no turn recorded within this gives up, which fails the test."""

Message = dict[str, str]


def unbounded() -> httpx.AsyncBaseTransport:
    """httpx's connections, as many as are asked for: a request must not wait for another one's."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncHTTPTransport(limits=limits, trust_env=False)


class Workload:
    """Plays episodes until told to stop, and writes down everything.

    Args:
        urls: of the API processes.
        seed: of everything that is random here.
        metadata: sent with collects of tree sessions, for the finish hook.
        call_s: any request's deadline.
        network: gives the connections of the agents, and those of the driver.
    """

    def __init__(
        self,
        urls: Sequence[str],
        history: History,
        seed: int,
        *,
        metadata: dict[str, Any] | None = None,
        call_s: float = CALL_S,
        network: Callable[[], httpx.AsyncBaseTransport] = unbounded,
    ) -> None:
        self.history = history
        self._urls = list(urls)
        self._draw = random.Random(seed)
        self._metadata = metadata
        self._stopping = False
        self._next = 0
        self._http = httpx.AsyncClient(timeout=call_s, transport=network())
        self._call_s = call_s
        self.driver = Driver(self._urls, history, call_s, network())

    @asynccontextmanager
    async def running(self, episodes: int) -> AsyncIterator[None]:
        """So many episodes at a time while the block lasts; those that run at its end are finished."""
        players = [asyncio.create_task(self._play()) for _ in range(episodes)]
        try:
            yield
        except BaseException:
            for player in players:
                player.cancel()
            raise
        finally:
            self._stopping = True
            outcomes = await asyncio.gather(*players, return_exceptions=True)
            await self._close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        await self._http.aclose()
        await self.driver.aclose()

    async def _play(self) -> None:
        while not self._stopping:
            await self.episode("tree" if self._draw.random() < 0.4 else "linear")

    async def episode(self, mode: str) -> None:
        """One session from its opening to beyond its end."""
        handle = None
        if self._draw.random() < 0.4:
            handle = await self.open_by_driver(mode)
        session = handle.id if handle else await self.open(mode)
        turns = self._draw.randrange(2, 7)
        streams = [self._draw.random() < 0.4 for _ in range(1 if mode == "linear" else 2)]
        await asyncio.gather(*(self.agent(session, turns, mode == "tree", is_so) for is_so in streams))
        if handle:
            await self.driver.collect(handle, self._metadata)
        else:
            await asyncio.gather(*(self.collect(session) for _ in range(self._draw.randrange(1, 3))))
        for _ in range(self._draw.randrange(1, 3)):
            await asyncio.gather(*(self.delete(session) for _ in range(self._draw.randrange(1, 4))))
        if self._draw.random() < 0.5:
            await self._call("chat", session, **self._chat_body([{"role": "user", "content": "late"}], ""))
        if self._draw.random() < 0.3:
            await self._call("collect", session)

    async def open(self, mode: str) -> str:
        """A session; opening is repeated until it succeeds."""
        async for _ in self._tries():
            call = await self._call("open", "", mode=mode)
            if call.ok:
                return call.session
        raise AssertionError("no session could be opened")

    async def open_by_driver(self, mode: str) -> Session:
        """The driver's session; opening is repeated until it succeeds."""
        async for _ in self._tries():
            if (session := await self.driver.open(mode)) is not None:
                return session
        raise AssertionError("no session could be opened")

    async def agent(self, session: str, turns: int, tree: bool = False, streams: bool = False) -> None:
        """One conversation. Some turns are asked for a second time, some by two siblings at the same time."""
        messages: list[Message] = []
        continues = ""
        for number in range(turns):
            messages = [*messages, {"role": "user", "content": f"{uuid.uuid4().hex} {number}"}]
            call, answer = await self.turn(session, messages, continues, streams)
            if self._draw.random() < 0.15:  # the answer was not liked
                call, answer = await self.turn(session, messages, continues, streams)
            if tree and self._draw.random() < 0.3:
                side = [*messages, answer, {"role": "user", "content": f"{uuid.uuid4().hex} aside"}]
                await asyncio.gather(*(self.turn(session, side, call.response_id) for _ in range(2)))
            messages, continues = [*messages, answer], call.response_id
            if self._draw.random() < 0.1:
                await self.collect(session)

    async def turn(
        self, session: str, messages: list[Message], continues: str, streams: bool = False
    ) -> tuple[Call, Message]:
        """One answered turn, after as many attempts as it takes."""
        call = None
        async for _ in self._tries():
            call = await self._call("chat", session, streams=streams, **self._chat_body(messages, continues))
            if call.ok:
                return call, {"role": "assistant", "content": call.text}
            if call.status is not None and call.retry == "false":
                break
        raise AssertionError(f"no turn within {_TURN_S:g} s: {call}")

    async def collect_once(self, session: str, deadline_s: float = COLLECT_S, **asked: Any) -> Call:
        """One collect, whatever becomes of it."""
        return await self._call("collect", session, asked=asked, deadline_s=deadline_s)

    async def collect_together(
        self, session: str, folder: Path, children: int, fault: Any = None, deadline_s: float = COLLECT_S
    ) -> list[Call]:
        """So many collects at once, each in a child of its own: the finish hook waits for the others.

        None has a result yet, as the folder is a new one.

        Args:
            session: a tree.
            folder: is made; `hooks.came_to` tells which children have come.
            fault: what the hook does when all have come.
        """
        folder.mkdir()
        meeting = {"folder": str(folder), "children": children}
        asked = [{FAULT: fault, MEETING: meeting, "number": number} for number in range(children)]
        return await asyncio.gather(
            *(self.collect_once(session, deadline_s, metadata=metadata) for metadata in asked)
        )

    async def collect(self, session: str) -> Call:
        """A collect that is repeated, as a trainer's operator would, until it is answered."""
        call = None
        asked = {"max_seq_len": self._draw.choice([None, None, 100_000])}
        async for _ in self._tries():
            call = await self._call("collect", session, asked=asked)
            if call.ok:
                return call
        raise AssertionError(f"no samples within {_TURN_S:g} s: {call}")

    async def delete(self, session: str) -> None:
        """A DELETE that is repeated until it is acknowledged."""
        call = None
        async for _ in self._tries():
            call = await self._call("delete", session)
            if call.ok:
                return
        raise AssertionError(f"no DELETE within {_TURN_S:g} s: {call}")

    async def _tries(self) -> AsyncIterator[int]:
        end = time.monotonic() + _TURN_S
        number = 0
        while time.monotonic() < end:
            yield number
            number += 1
            await asyncio.sleep(self._draw.uniform(0.05, min(0.05 * 2**number, 0.5)))

    def _chat_body(self, messages: list[Message], continues: str) -> dict[str, Any]:
        return {"attempt": uuid.uuid4().hex, "continues": continues, "messages": messages}

    async def _call(self, kind: Kind, session: str, **given: Any) -> Call:
        """Sends one request to the next API process and writes down what became of it."""
        self._next += 1
        url = f"{self._urls[self._next % len(self._urls)]}/sessions"
        method, body = "POST", b""
        deadline_s = given.pop("deadline_s", self._call_s)
        messages = given.pop("messages", None)
        headers = {}
        match kind:
            case "open":
                body = orjson.dumps({"mode": given["mode"]})
            case "chat":
                url = f"{url}/{session}/v1/chat/completions"
                fields = {"messages": messages, "user": given["attempt"]}
                body = orjson.dumps({**fields, "stream": True} if given.get("streams") else fields)
            case "collect":
                given.setdefault("asked", {})
                if self._metadata is not None:
                    given["asked"] = {**given["asked"], "metadata": self._metadata}
                url = f"{url}/{session}/samples"
                body = orjson.dumps({**given["asked"], "deadline_s": min(deadline_s, COLLECT_S)})
                given["contract"] = self._draw.choice([1, 2])
                headers = {"Accept-Contract": str(given["contract"])}
            case "delete":
                method, url = "DELETE", f"{url}/{session}"
        self.history.started += 1
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(max(self._call_s, deadline_s)),
                self._http.stream(method, url, content=body, headers=headers) as reply,
            ):
                await reply.aread()
            told: dict[str, Any] = {"status": reply.status_code, **read(kind, reply)}
        except (httpx.TransportError, TimeoutError) as error:
            told = {"status": None, "error": f"{type(error).__name__}: {error}"}
        call = Call(
            kind=kind,
            session=told.pop("session", session),
            began=began,
            ended=time.monotonic(),
            deadline_s=deadline_s,
            **{**told, **given},  # the contract that was asked for, whatever the reply says
        )
        self.history.add(call)
        return call
