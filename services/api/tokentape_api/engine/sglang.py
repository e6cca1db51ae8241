"""SGLang's OpenAI-style chat endpoint, token-in and token-out.

The request carries `input_ids` beside `messages`; the answer's `choices[0].meta_info` carries the sampled ids
and their log-probs (facts of SGLang 0.5.23). Everything that could make the recording wrong is checked before
the answer is used, and each complaint says what to set on the engine.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import httpx
import numpy as np
import orjson

from tokentape_api.engine import headers as proxy_headers
from tokentape_api.engine.port import EngineRefusal, Forwarded, Generated
from tokentape_contracts import limits
from tokentape_contracts.errors import (
    EngineReplyInvalid,
    EngineTimeout,
    EngineUnavailable,
    GenerationAborted,
)
from tokentape_contracts.events import Floats, Ids
from tokentape_core.domain.decide import Generation

_OWNED: Final[Mapping[str, Any]] = {
    "logprobs": True,
    "return_meta_info": True,
    "no_stop_trim": False,
    "stream": False,
}
"""Set by us whatever the client sent: without them the tokens would be missing or the text untrimmed."""
_DROPPED: Final = frozenset(
    {
        "stream_options",
        "return_routed_experts",
        "routed_experts_start_len",
        "return_indexer_topk",
        "input_ids",
    }
)
"""Never forwarded from the client."""
_NOT_KEPT: Final = frozenset(
    {"message", "meta_info", "logprobs", "finish_reason", "prompt_token_ids", "response_token_ids"}
)
"""Parts of a choice that the event holds elsewhere, or that follow from its tokens."""


class SGLangEngine:
    """The engine port on an SGLang server or router.

    Args:
        base_url: without `/v1`.
        timeout_s: the longest generation.
        transport: replaces the network, for tests.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=10.0, pool=timeout_s),
            limits=httpx.Limits(
                max_connections=limits.ENGINE_CONNECTIONS, max_keepalive_connections=limits.ENGINE_CONNECTIONS
            ),
            transport=transport,
            trust_env=False,
        )

    async def generate(
        self, session_id: str, prompt: Ids, request: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Generated:
        kept = {name: value for name, value in request.items() if name not in _DROPPED}
        body = orjson.dumps({**kept, **_OWNED, "input_ids": prompt}, option=orjson.OPT_SERIALIZE_NUMPY)
        sent = {**proxy_headers.to_engine(session_id, headers), "content-type": "application/json"}
        with _engine_errors(self._base_url):
            # httpx's own timeouts begin anew with every chunk.
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(
                    "POST", f"{self._base_url}/v1/chat/completions", content=body, headers=sent
                ) as response,
            ):
                content = await _read(response)
        if response.status_code != 200:
            content_type = response.headers.get("content-type", "application/octet-stream")
            raise EngineRefusal(response.status_code, content, content_type)
        return parse_answer(content, len(prompt))

    @asynccontextmanager
    async def forward(
        self, session_id: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[Forwarded]:
        url = httpx.URL(f"{self._base_url}/{path}", query=query.encode() or None)
        sent = proxy_headers.to_engine(session_id, headers)
        with _engine_errors(self._base_url):
            async with self._client.stream(method, url, content=body, headers=sent) as response:
                received = proxy_headers.to_client(session_id, self._base_url, response.headers)
                yield Forwarded(response.status_code, received, response.aiter_bytes())

    async def ready(self) -> None:
        with _engine_errors(self._base_url):
            response = await self._client.get(f"{self._base_url}/health", timeout=limits.READY_TIMEOUT_S)
        if response.status_code != 200:
            raise EngineUnavailable(f"the engine's /health answers {response.status_code}")

    async def close(self) -> None:
        await self._client.aclose()


@contextmanager
def _engine_errors(url: str) -> Iterator[None]:
    """Maps what httpx raises: the one border where its errors become ours."""
    try:
        yield
    except (httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ConnectError) as error:
        raise EngineUnavailable(
            f"the engine at {url} cannot be reached: {error or type(error).__name__}"
        ) from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise EngineTimeout(f"the engine at {url} did not answer in time ({type(error).__name__})") from error
    except httpx.TransportError as error:
        raise EngineUnavailable(f"the engine at {url} broke off: {error or type(error).__name__}") from error


async def _read(response: httpx.Response) -> bytes:
    chunks = []
    size = 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > limits.ENGINE_REPLY_BYTES:
            raise EngineReplyInvalid(f"the engine's answer is longer than {limits.ENGINE_REPLY_BYTES} bytes")
    return b"".join(chunks)


def parse_answer(content: bytes, prompt_tokens: int) -> Generated:
    """Checks a 200 answer and takes it apart.

    Args:
        content: the body.
        prompt_tokens: how many tokens were sent; an engine that counted others did not use them.

    Raises:
        EngineReplyInvalid: something that the recording needs is missing or wrong.
        GenerationAborted: the engine interrupted the generation, as it does for a weight update.
    """
    answer = _parse_json(content)
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineReplyInvalid("the engine's answer must have exactly one choice")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if not isinstance(finish, str):
        raise EngineReplyInvalid(f"choices[0].finish_reason must be a string, not {finish!r}")
    if finish == "abort":
        raise GenerationAborted("the engine interrupted the generation; nothing was recorded, send it again")
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise EngineReplyInvalid(
            "choices[0].message.content must be a string, also beside tool calls; the engine sent "
            f"{message.get('content') if isinstance(message, dict) else message!r}. Check the engine's "
            "version and its --tool-call-parser"
        )
    meta = choice.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineReplyInvalid(
            "choices[0].meta_info is missing although return_meta_info was asked for: this is not SGLang, it "
            "is older than 0.5.6, or a router strips the field"
        )
    output, logprobs = _tokens(meta)
    if meta.get("prompt_tokens", prompt_tokens) != prompt_tokens:
        raise EngineReplyInvalid(
            f"meta_info.prompt_tokens is {meta['prompt_tokens']}, but {prompt_tokens} input_ids were sent: "
            "the engine or a router before it ignores input_ids"
        )
    rest = {name: value for name, value in choice.items() if name not in _NOT_KEPT}
    generation = Generation(
        output=output,
        logprobs=logprobs,
        finish=finish,
        response_id=str(answer.get("id", "")),
        message=message,
        reply={**answer, "choices": [rest]},
        meta={name: value for name, value in meta.items() if name != "output_token_logprobs"},
    )
    return Generated(generation, answer)


def _parse_json(content: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            # The standard library reads NaN, which JSON has not: the check of the log-probs can name it.
            answer = json.loads(content)
        except ValueError as error:
            raise EngineReplyInvalid(
                f"the engine answered 200 with a body that is not JSON: {error}"
            ) from error
    if not isinstance(answer, dict):
        raise EngineReplyInvalid("the engine answered 200 with JSON that is not an object")
    return answer


def _tokens(meta: Mapping[str, Any]) -> tuple[Ids, Floats]:
    triples = meta.get("output_token_logprobs")
    if not isinstance(triples, list):
        raise EngineReplyInvalid(
            "meta_info.output_token_logprobs is missing although logprobs=true was asked for: a router may "
            "strip it"
        )
    count = meta.get("completion_tokens")
    if count != len(triples):
        raise EngineReplyInvalid(
            f"meta_info.output_token_logprobs has {len(triples)} entries, completion_tokens says {count}"
        )
    try:
        output = np.asarray([triple[1] for triple in triples] or np.empty(0, np.int64))
        logprobs = np.array([triple[0] for triple in triples], np.float64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise EngineReplyInvalid(
            f"meta_info.output_token_logprobs must hold [log-prob, id, text]: {error}"
        ) from error
    if output.dtype.kind != "i" or (len(output) and not 0 <= output.min() <= output.max() < 2**31):
        raise EngineReplyInvalid("meta_info.output_token_logprobs holds something that is not a token id")
    return output.astype(np.int32), logprobs
