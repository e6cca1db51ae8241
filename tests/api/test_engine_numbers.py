"""Ids and log-probs of an engine's answer: what is none is refused by both adapters alike."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.scripted import network
from tokentape_api.engine import SGLangEngine, VLLMEngine
from tokentape_api.engine.client import HttpEngine
from tokentape_contracts.errors import EngineReplyInvalid
from tokentape_core.domain.decide import Generation

PROMPT = np.arange(3, dtype=np.int32)
MESSAGE = {"role": "assistant", "content": "fine"}


def sglang(ids: list[Any], log_probs: list[Any]) -> dict[str, Any]:
    triples = [[log_prob, token, None] for token, log_prob in zip(ids, log_probs, strict=True)]
    meta = {"prompt_tokens": 3, "completion_tokens": len(ids), "output_token_logprobs": triples}
    return {"choices": [{"message": MESSAGE, "finish_reason": "stop", "meta_info": meta}]}


def vllm(ids: list[Any], log_probs: list[Any]) -> dict[str, Any]:
    choice = {
        "message": MESSAGE,
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": log_prob} for log_prob in log_probs]},
    }
    return {"choices": [choice], "prompt_token_ids": PROMPT.tolist()}


class Said:
    """An engine of either kind that gives these ids and log-probs."""

    def __init__(self, kind: str) -> None:
        self._answer = {"sglang": sglang, "vllm": vllm}[kind]
        self._body = b""
        adapter = {"sglang": SGLangEngine, "vllm": VLLMEngine}[kind]
        self.engine: HttpEngine = adapter("http://engine", timeout_s=5.0, **network(self._handle))

    def _handle(self, _: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=self._body)

    async def generation(self, ids: list[Any], log_probs: list[Any]) -> Generation:
        self._body = json.dumps(self._answer(ids, log_probs)).encode()
        return (await self.engine.generate("s", PROMPT, {"messages": []}, {})).generation


@pytest.fixture(params=["sglang", "vllm"])
async def said(request: pytest.FixtureRequest) -> AsyncIterator[Said]:
    said = Said(request.param)
    yield said
    await said.engine.close()


async def test_numbers_are_taken_exactly(said: Said) -> None:
    """Fractions, whole numbers and what was rounded to a little above 0 are log-probs, to the last bit."""
    given = [-0.1234567891234567, -3, 0, 0.0, 0.01, -1e300]
    found = await said.generation([0, 1, 2, 3, 4, 2**31 - 1], given)
    assert found.logprobs.tolist() == given
    assert found.output.tolist() == [0, 1, 2, 3, 4, 2**31 - 1]
    assert (found.logprobs.dtype, found.output.dtype) == (np.float64, np.int32)


async def test_no_token_has_no_log_prob(said: Said) -> None:
    """A generation of no tokens is taken as it is."""
    found = await said.generation([], [])
    assert (len(found.output), len(found.logprobs)) == (0, 0)


@pytest.mark.parametrize(
    ("value", "mention"),
    [
        ("-0.5", "is '-0.5': a log-prob is a number"),
        (True, "is True: a log-prob is a number"),
        (False, "is False: a log-prob is a number"),
        (None, "is None: a log-prob is a number"),
        ([-0.5], r"is \[-0\.5\]: a log-prob is a number"),
        ({"logprob": -0.5}, r"is \{'logprob': -0\.5\}: a log-prob is a number"),
        (float("nan"), "is nan: look at the model's dtype"),
        (float("inf"), "is inf: look at the model's dtype"),
        (float("-inf"), "is -inf: look at the model's dtype"),
        (0.011, "is 0.011: no probability is above 1"),
        (1, "is 1: no probability is above 1"),
    ],
    ids=repr,
)
async def test_what_is_no_log_prob(said: Said, value: Any, mention: str) -> None:
    """The error says which token's it is, what came and what to look at; nothing is made a number of."""
    with pytest.raises(EngineReplyInvalid, match=f"the log-prob of output token 2 {mention}"):
        await said.generation([1, 2, 3, 4], [-0.5, -1, value, value])


async def test_a_long_value_is_not_quoted_whole(said: Said) -> None:
    """Of what stands in place of a log-prob, the error quotes the beginning."""
    with pytest.raises(EngineReplyInvalid, match="output token 0 is 'xxx") as caught:
        await said.generation([1], ["x" * 10_000])
    assert len(caught.value.detail) < 400


async def test_an_integer_that_no_float_holds(said: Said) -> None:
    """A number of hundreds of digits is refused as well, where one parser of JSON makes an integer of it."""
    with pytest.raises(EngineReplyInvalid, match="an integer that no float64 can hold"):
        await said.generation([1, 2], [10**400, float("nan")])


@pytest.mark.parametrize("value", [True, None, "7", 7.0, -1, 2**31, 2**63, 2**70, [7], {}], ids=repr)
async def test_what_is_no_id(said: Said, value: Any) -> None:
    """An id is an integer that int32 holds; true beside integers is no 1."""
    with pytest.raises(EngineReplyInvalid, match="not a token id"):
        await said.generation([1, value], [-0.5, -0.5])
