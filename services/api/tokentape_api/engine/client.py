"""The HTTP half of every engine adapter: connections, timeouts, errors, and answers of any size.

An adapter adds what differs: which fields ask for a generation, and the rules of its answer.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import aiohttp
import orjson
from yarl import URL

from tokentape_api.engine import headers as proxy_headers
from tokentape_api.engine.answer import Answer, Sent
from tokentape_api.engine.body import Body
from tokentape_api.engine.port import (
    NOTHING,
    Check,
    EngineRefusal,
    Forwarded,
    Generated,
    Incoming,
    Network,
    Wanted,
)
from tokentape_api.engine.probe import Probe
from tokentape_api.engine.transport import AiohttpNetwork
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid, EngineTimeout, EngineUnavailable, text_of
from tokentape_contracts.events import Ids

T = TypeVar("T")

_PIECE: Final = 64 * 1024
"""Bytes of an answer that are searched and decoded before the event loop turns."""
_INLINE: Final = 64 * 1024
"""An answer up to this size is parsed on the event loop, a larger one in a thread; so is a request with more
tokens written."""


class HttpEngine(ABC):
    """The engine port over HTTP.

    Args:
        base_url: without `/v1`.
        timeout_s: the longest generation.
        replay: the payloads that turns will ask for, so that the probe asks for them too.
        incremental: whether turns will ask for the rows from a later position on.
        network: None for the real one.
    """

    answer_class: ClassVar[type[Answer]]
    dropped: ClassVar[frozenset[str]] = frozenset(
        {
            "stream_options",
            "return_routed_experts",
            "routed_experts_start_len",
            "return_indexer_topk",
            "input_ids",
        }
    )
    """Fields that are never forwarded from the client."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        replay: Mapping[str, Wanted] = NOTHING,
        incremental: bool = False,
        network: Network | None = None,
    ) -> None:
        url = URL(base_url.rstrip("/"))
        self._base_url = str(url)
        self._generation_url = f"{self._base_url}/v1/chat/completions"
        self._shown_url = str(url.with_user(None))
        """What agents may read in an error."""
        self._timeout_s = timeout_s
        self._probe = Probe(self._ask, replay, incremental)
        self._network = network or AiohttpNetwork()

    @abstractmethod
    def fields(self, prompt: Ids, replay: Mapping[str, Wanted]) -> dict[str, Any]:
        """The fields of a request that are ours, whatever the client sent."""

    async def generate(
        self,
        session_id: str,
        prompt: Ids,
        request: Mapping[str, Any],
        headers: Mapping[str, str],
        replay: Mapping[str, Wanted] = NOTHING,
    ) -> Generated:
        return await self._exchange(session_id, Sent(prompt, replay), request, headers, Answer.generated)

    @asynccontextmanager
    async def forward(
        self, session_id: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[Forwarded]:
        url = f"{self._base_url}/{path}" + (f"?{query}" if query else "")
        sent = {"accept-encoding": "identity", **proxy_headers.to_engine(session_id, headers)}
        with _engine_errors(self._shown_url):
            async with (
                asyncio.timeout(self._timeout_s),
                self._network.send(method, url, body, sent) as incoming,
            ):
                answered = proxy_headers.joined(incoming.headers)
                proxy_headers.ensure_head(incoming.status, answered)
                received = proxy_headers.to_client(session_id, self._base_url, answered)
                yield Forwarded(incoming.status, received, incoming.body)

    async def ready(self) -> None:
        is_healthy = False
        try:
            with _engine_errors(self._shown_url):
                async with (
                    asyncio.timeout(limits.READY_TIMEOUT_S),
                    self._network.send("GET", f"{self._base_url}/health", b"", {}) as incoming,
                ):
                    status = incoming.status
            if status != 200:
                raise EngineUnavailable(f"the engine's /health answers {status}")
            is_healthy = True
        finally:
            if not is_healthy:
                self._probe.forget()

    async def probe(self, wait_s: float) -> Sequence[Check] | None:
        return await self._probe.checks(wait_s)

    async def close(self) -> None:
        await self._probe.close()
        await self._network.close()

    async def _ask(self, session_id: str, sent: Sent, request: Mapping[str, Any]) -> Answer:
        """An answer whose rules have not been checked."""
        return await self._exchange(session_id, sent, request, {}, lambda answer: answer)

    async def _exchange(
        self,
        session_id: str,
        sent: Sent,
        request: Mapping[str, Any],
        headers: Mapping[str, str],
        use: Callable[[Answer], T],
    ) -> T:
        """Sends one request; what `use` makes of the answer."""
        kept = {name: value for name, value in request.items() if name not in self.dropped}
        content = await _dumped({**kept, **self.fields(sent.prompt, sent.replay)}, len(sent.prompt))
        sent_headers = {
            **proxy_headers.to_engine(session_id, headers),
            "content-type": "application/json",
            # A compressed answer would come in pieces of unknown size, and base64 is not worth it on a LAN.
            "accept-encoding": "identity",
        }
        body = Body(sent.replay, self.answer_class.new_values)
        with _engine_errors(self._shown_url):
            async with (
                asyncio.timeout(self._timeout_s),
                self._network.send("POST", self._generation_url, content, sent_headers) as incoming,
            ):
                if incoming.status != 200:
                    raise await _refusal(incoming)
                async for piece in _pieces(incoming):
                    body.feed(piece)

        def read() -> T:
            return use(self.answer_class(body, sent))

        return read() if body.size <= _INLINE else await asyncio.to_thread(read)


async def _dumped(body: dict[str, Any], tokens: int) -> bytes:
    """The JSON of a request with so many prompt tokens."""
    dump = partial(orjson.dumps, body, option=orjson.OPT_SERIALIZE_NUMPY)
    return dump() if tokens <= _INLINE else await asyncio.to_thread(dump)


async def _refusal(incoming: Incoming) -> EngineRefusal:
    """What is passed on of an answer other than 200.

    Raises:
        EngineReplyInvalid: it refuses nothing, or cannot be passed on.
    """
    headers = proxy_headers.joined(incoming.headers)
    content_type = headers.get("content-type", "application/octet-stream")
    proxy_headers.ensure_head(incoming.status, {"content-type": content_type})
    if incoming.status < 300:
        raise EngineReplyInvalid(f"the engine answered {incoming.status}: neither an answer nor a refusal")
    if not (content_type.isascii() and content_type.isprintable()):
        raise EngineReplyInvalid(f"the engine's content type {content_type!r} is not ASCII")
    content = b"".join([piece async for piece in _pieces(incoming)])
    return EngineRefusal(incoming.status, content, content_type)


async def _pieces(incoming: Incoming) -> AsyncIterator[bytes]:
    """The body as it comes in, in small pieces; the loop turns between them.

    Raises:
        EngineReplyInvalid: it is above its limit.
    """
    size = 0
    async for chunk in incoming.body:
        size += len(chunk)
        if size > limits.ENGINE_REPLY_BYTES:
            raise EngineReplyInvalid(f"the engine's answer is longer than {limits.ENGINE_REPLY_BYTES} bytes")
        for start in range(0, len(chunk), _PIECE):
            if start:
                await asyncio.sleep(0)
            yield chunk[start : start + _PIECE]


@contextmanager
def _engine_errors(url: str) -> Iterator[None]:
    """Maps what aiohttp raises: the one border where its errors become ours."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineUnavailable(f"the engine at {url} cannot be reached: {text_of(error)}") from error
    except TimeoutError as error:
        raise EngineTimeout(f"the engine at {url} did not answer in time ({type(error).__name__})") from error
    except aiohttp.ClientResponseError as error:  # of bytes that are no HTTP; its text has the whole URL
        said = " ".join(error.message.split())
        raise EngineReplyInvalid(f"what the engine at {url} sent is not HTTP: {said}") from error
    except aiohttp.ClientError as error:
        raise EngineUnavailable(f"the engine at {url} broke off: {text_of(error)}") from error
