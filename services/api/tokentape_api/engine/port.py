"""The port to an inference engine."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tokentape_contracts.events import Ids
from tokentape_core.domain.decide import Generation


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
        answer: the engine's JSON, for the client.
    """

    generation: Generation
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forwarded answer: status, headers, and the body as it comes in."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


class Engine(Protocol):
    """What the API needs of an inference engine."""

    async def generate(
        self, session_id: str, prompt: Ids, request: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Generated:
        """Generates one turn from exactly these prompt tokens.

        Args:
            prompt: int32[P].
            request: the chat request without what the server owns.
            headers: the client's headers.

        Raises:
            EngineRefusal: a status other than 200.
            EngineUnavailable, EngineTimeout, GenerationAborted, EngineReplyInvalid
        """

    def forward(
        self, session_id: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[Forwarded]:
        """Sends any other request on, to a path under the engine's base URL."""

    async def ready(self) -> None:
        """Raises `EngineUnavailable` unless the engine says that it is healthy."""

    async def close(self) -> None:
        """Closes the connections."""
