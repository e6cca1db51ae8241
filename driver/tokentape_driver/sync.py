"""The client for code without an event loop: a private thread runs the loop, the caller waits."""

import asyncio
import threading
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import httpx

from tokentape_contracts import limits
from tokentape_driver.client import AlteredAnswer, TokentapeClient
from tokentape_driver.left_out import OnLeftOut
from tokentape_driver.rollout import Agent, Mode, rollout
from tokentape_driver.sample import S
from tokentape_driver.session import Collected, Session

R = TypeVar("R")


class SyncClient:
    """`TokentapeClient` with methods that wait; the promises and errors are those of the async ones.

    May be shared by threads, and be called where another event loop runs (which then waits too). Not to be
    carried over a fork. `with SyncClient(url) as client:` closes it, and so does `close`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = TokentapeClient(base_url, token=token, transport=transport)
        self._lock = threading.Lock()
        self._closed = False
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="tokentape-client", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = started.result()

    def open_session(
        self,
        mode: str | None = None,
        *,
        labels: Mapping[str, Any] | None = None,
        pins: Mapping[str, Any] | None = None,
        matcher: str | None = None,
        altered_answer: AlteredAnswer | None = None,
    ) -> Session:
        """See `TokentapeClient.open_session`. The session is a handle for this client's methods."""
        return self.run(
            self._client.open_session(
                mode, labels=labels, pins=pins, matcher=matcher, altered_answer=altered_answer
            )
        )

    def collect_samples(
        self,
        session: Session,
        input_sample: S,
        *,
        max_seq_len: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float = limits.DRIVER_COLLECT_S,
        on_left_out: OnLeftOut = "warn",
        reasons: Collection[str] | None = None,
    ) -> Collected[S]:
        """See `Session.collect_samples`."""
        return self.run(
            session.collect_samples(
                input_sample,
                max_seq_len=max_seq_len,
                metadata=metadata,
                deadline_s=deadline_s,
                on_left_out=on_left_out,
                reasons=reasons,
            )
        )

    def delete(self, session: Session) -> None:
        """See `Session.delete`."""
        self.run(session.delete())

    @overload
    def rollout(
        self, agent: Agent[S], sample: S, *, mode: Literal["linear"] = "linear", **options: Any
    ) -> S: ...

    @overload
    def rollout(self, agent: Agent[S], sample: S, *, mode: Literal["tree"], **options: Any) -> list[S]: ...

    @overload
    def rollout(self, agent: Agent[S], sample: S, *, mode: Mode, **options: Any) -> S | list[S]: ...

    def rollout(self, agent: Agent[S], sample: S, *, mode: Mode = "linear", **options: Any) -> S | list[S]:
        """See `rollout`, whose keywords these are; the agent is async and runs on the private loop.

        An agent that blocks goes through `asyncio.to_thread`, else it holds up every other one.
        """
        return self.run(rollout(agent, sample, client=self._client, mode=mode, **options))

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Waits for a coroutine on the private loop; an interrupt (Ctrl-C) of the wait cancels it.

        Raises:
            RuntimeError: the client is closed, or this is the private loop's own thread.
            concurrent.futures.CancelledError: `close` was called meanwhile.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("SyncClient was called on its own event loop, which would wait for ever")
        with self._lock:  # after `close` nobody would run what is submitted
            if self._closed:
                coroutine.close()
                raise RuntimeError("SyncClient is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what still runs (its sessions are deleted) and closes the connections; may be repeated."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self, started: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
        try:
            asyncio.run(self._until_stopped(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _until_stopped(
        self, started: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]"
    ) -> None:
        stop = asyncio.Event()
        async with self._client:
            started.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
