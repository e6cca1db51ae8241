"""The real driver among the clients; what goes over its network is written down."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import httpx
import orjson

from tests.faults.history import Call, History, Kind
from tests.faults.replies import read
from tokentape_contracts import limits
from tokentape_contracts.errors import TokentapeError
from tokentape_driver import CollectTimeout, RolloutSample, TokentapeClient
from tokentape_driver.session import Session


class Driver:
    """Opens, collects and deletes with `tokentape_driver`, as a trainer does.

    Args:
        urls: of the API processes, of which each request gets the next one.
        collect_s: the deadline of a collect.
        network: the connections; closed by `aclose`.
    """

    def __init__(
        self, urls: Sequence[str], history: History, collect_s: float, network: httpx.AsyncBaseTransport
    ) -> None:
        self._history = history
        self._collect_s = collect_s
        self._balancer = _Balancer(urls, history, collect_s, network)
        self._client = TokentapeClient("http://balancer", transport=self._balancer)

    async def open(self, mode: str) -> Session | None:
        """A session, or None if the driver raised one of its errors."""
        try:
            return await self._client.open_session(mode)
        except TokentapeError:
            return None

    async def collect(self, session: Session, metadata: Mapping[str, Any] | None = None) -> None:
        """One POST and one DELETE, whatever becomes of them; the driver repeats neither."""
        handed = None
        failure: TokentapeError | None = None
        try:
            collected = await session.collect_samples(
                RolloutSample(index=0), metadata=metadata, deadline_s=self._collect_s
            )
            handed = tuple(tuple(sample.tokens) for sample in collected.samples)
        except TokentapeError as error:
            failure = error
        call = self._balancer.collects.pop(session.id)
        self._history.add(replace(call, handed=handed))
        if call.ok and failure is not None and not isinstance(failure, CollectTimeout):
            raise failure

    async def aclose(self) -> None:
        await self._client.aclose()


class _Balancer(httpx.AsyncBaseTransport):
    """Sends each request to the next API process.

    Attributes:
        collects: by session, what became of its collect; the rest is in the history.
    """

    def __init__(
        self, urls: Sequence[str], history: History, collect_s: float, network: httpx.AsyncBaseTransport
    ) -> None:
        self.collects: dict[str, Call] = {}
        self._targets = cycle([httpx.URL(url) for url in urls])
        self._history = history
        self._deadlines: Mapping[Kind, float] = {
            "open": limits.DRIVER_OPEN_S,
            "collect": collect_s,
            "delete": limits.DRIVER_DELETE_S,
        }
        self._network = network

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        kind, session, given = _told_by(request)
        target = next(self._targets)
        request.url = request.url.copy_with(host=target.host, port=target.port)
        self._history.started += 1
        began = time.monotonic()
        told: dict[str, Any] = {}
        try:
            streamed = await self._network.handle_async_request(request)
            content = await streamed.aread()
            await streamed.aclose()
            response = httpx.Response(streamed.status_code, headers=streamed.headers, content=content)
            told = {"status": response.status_code, **read(kind, response)}
        except BaseException as error:  # also the driver's deadline, which cancels this
            told = {"status": None, "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            call = Call(
                kind=kind,
                session=told.pop("session", session),
                began=began,
                ended=time.monotonic(),
                deadline_s=self._deadlines[kind],
                **given,
                **told,
            )
            if kind == "collect":
                self.collects[session] = call
            else:
                self._history.add(call)
        return response

    async def aclose(self) -> None:
        await self._network.aclose()


def _told_by(request: httpx.Request) -> tuple[Kind, str, dict[str, Any]]:
    """What is asked, of which session, and what else the history keeps of it."""
    session = request.url.path.split("/")[2:3]
    if not session:
        return "open", "", {"mode": orjson.loads(request.content)["mode"]}
    if request.method == "DELETE":
        return "delete", session[0], {}
    asked = orjson.loads(request.content)
    del asked["deadline_s"]
    return "collect", session[0], {"asked": asked}
