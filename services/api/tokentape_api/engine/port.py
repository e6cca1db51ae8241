"""The port to an inference engine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from tokentape_contracts.events import Ids
from tokentape_core.domain.decide import Generation
from tokentape_core.domain.replay import Rows

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
"""No routing replay payloads."""


class EngineRefusal(Exception):
    """The engine answered with a status other than 200; the caller gets it as it is, and nothing is recorded.

    Args:
        status: the engine's HTTP status.
        body: its body.
        content_type: its media type.
    """

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"the engine answered {status}")
        self.status = status
        self.body = body
        self.content_type = content_type


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A checked answer of the engine.

    Attributes:
        generation: what is recorded.
        completion: the engine's JSON without the routing replay payloads.
        written: the same as bytes, for the client.
        replay: kind → rows, of the wanted payloads that the engine sent.
    """

    generation: Generation
    completion: dict[str, Any]
    written: bytes
    replay: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A routing replay payload that is asked for.

    Attributes:
        start: position of the first row.
        layers: `L` of its shape [N, L, K]; None if the engine says it.
    """

    start: int = 0
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """An answer on its way: status, headers as the engine wrote them, and the body as it comes in."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """An answer that is passed on: status, headers for the client, and the body as it comes in."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the recording needs of the engine.

    Attributes:
        name: what was looked for.
        state: what was found.
        detail: one sentence: what came, and what to change if it is not ok.
    """

    name: str
    state: Literal["ok", "missing", "wrong"]
    detail: str


class Network(Protocol):
    """Where requests to the engine go."""

    def send(
        self, method: str, url: str, content: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Incoming]:
        """Sends one request, and never a second time.

        Args:
            url: percent-encoded; it arrives as it is.
            headers: each character of a value is one byte, as Starlette reads them.

        Raises:
            aiohttp.ClientError: as aiohttp does.
        """

    async def close(self) -> None:
        """Closes the connections."""


class Engine(Protocol):
    """What the API needs of an inference engine."""

    async def generate(
        self,
        session_id: str,
        prompt: Ids,
        request: Mapping[str, Any],
        headers: Mapping[str, str],
        replay: Mapping[str, Wanted] = NOTHING,
    ) -> Generated:
        """Generates one turn from exactly these prompt tokens.

        Args:
            prompt: int32[P].
            request: the chat request without what the server owns.
            headers: the client's headers.
            replay: kind (of `tokentape_core.domain.replay.KINDS`) → what is wanted of it; no other is asked
                for, whatever the client sent.

        Raises:
            EngineRefusal: a status other than 200.
            EngineUnavailable, EngineTimeout, GenerationAborted, EngineReplyInvalid
        """

    def forward(
        self, session_id: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[Forwarded]:
        """Sends any other request on, to a path under the engine's base URL.

        Args:
            path, query: percent-encoded.

        Raises:
            EngineUnavailable, EngineTimeout: the latter also while the answer is read.
            EngineReplyInvalid: status or headers that HTTP does not have.
        """

    async def ready(self) -> None:
        """Raises a `TokentapeError` unless the engine says that it is healthy."""

    async def probe(self, wait_s: float) -> Sequence[Check] | None:
        """What tiny generations hold of all that the recording needs; None if they run longer than `wait_s`.

        A success is remembered until `ready` finds the engine unhealthy; a failure is not, so the call after
        the one that reported it probes again. Concurrent calls share the generations.
        """

    async def close(self) -> None:
        """Closes the connections."""
