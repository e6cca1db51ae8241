"""The vLLM adapter: what is sent, what is recorded, and what is refused."""

import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.scripted import network, replay_rows
from tokentape_api.engine import Generated, VLLMEngine, Wanted
from tokentape_contracts.errors import EngineReplyInvalid, GenerationAborted

PROMPT = np.arange(10, 30, dtype=np.int32)
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def npy(values: NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


@dataclass
class Scripted:
    """A vLLM server that samples tokens 7, 8, 9."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    change: Callable[[dict[str, Any]], object] = lambda _: None

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        ids = body["kv_transfer_params"]["prompt_token_ids"]
        content = [{"token": "x", "logprob": p, "top_logprobs": []} for p in (-0.5, -0.25, -0.125)]
        answer = {
            "id": "chatcmpl-1",
            "model": "m",
            "prompt_token_ids": ids,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "fine", "tool_calls": []},
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": [7, 8, 9],
                    "logprobs": {"content": content},
                    "routed_experts": None,
                }
            ],
            "usage": {
                "prompt_tokens": len(ids),
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
            "kv_transfer_params": None,
        }
        self.change(answer)
        return httpx.Response(200, content=json.dumps(answer))


@pytest.fixture
def vllm() -> Scripted:
    return Scripted()


@pytest.fixture
async def upstream(vllm: Scripted) -> AsyncIterator[VLLMEngine]:
    upstream = VLLMEngine("http://engine", timeout_s=5.0, **network(vllm.handle))
    yield upstream
    await upstream.close()


async def generate(upstream: VLLMEngine, wanted: Wanted | None = None, **fields: Any) -> Generated:
    replay = {"routed_experts": wanted} if wanted else {}
    return await upstream.generate("s", PROMPT, {**REQUEST, **fields}, {}, replay)


async def test_tokens_go_in_and_come_out(upstream: VLLMEngine, vllm: Scripted) -> None:
    """The prompt goes where vLLM reads it, and its tokens, log-probs and counters are recorded."""
    found = await generate(upstream, temperature=0.5)
    sent = vllm.bodies[0]
    assert sent["kv_transfer_params"] == {"prompt_token_ids": PROMPT.tolist()}
    assert (sent["logprobs"], sent["return_token_ids"], sent["stream"]) == (True, True, False)
    assert (sent["temperature"], sent["messages"]) == (0.5, REQUEST["messages"])
    generation = found.generation
    assert (generation.output.tolist(), generation.logprobs.tolist()) == ([7, 8, 9], [-0.5, -0.25, -0.125])
    assert generation.meta == {"prompt_tokens": 20, "completion_tokens": 3, "cached_tokens": 16}
    assert (generation.finish, generation.response_id) == ("stop", "chatcmpl-1")


async def test_what_the_server_owns(upstream: VLLMEngine, vllm: Scripted) -> None:
    """A client can neither bring its own prompt ids nor switch off what the recording needs."""
    await generate(
        upstream,
        input_ids=[1],
        prompt_token_ids=[1],
        kv_transfer_params={"prompt_token_ids": [1]},
        return_token_ids=False,
        logprobs=False,
        stream=True,
        stream_options={},
        return_routed_experts=True,
    )
    sent = vllm.bodies[0]
    assert sent["kv_transfer_params"] == {"prompt_token_ids": PROMPT.tolist()}
    assert (sent["logprobs"], sent["return_token_ids"], sent["stream"]) == (True, True, False)
    assert {"input_ids", "prompt_token_ids", "stream_options", "return_routed_experts"}.isdisjoint(sent)


async def test_the_prompt_is_not_stored_again(upstream: VLLMEngine) -> None:
    """What the event holds as arrays is not kept in its JSON too (INV-6); the client sees vLLM's answer."""
    found = await generate(upstream)
    assert "prompt_token_ids" not in found.generation.reply
    assert {"message", "token_ids", "logprobs"}.isdisjoint(found.generation.reply["choices"][0])
    assert found.completion["prompt_token_ids"] == PROMPT.tolist()
    assert found.completion["choices"][0]["token_ids"] == [7, 8, 9]


async def test_null_content(upstream: VLLMEngine, vllm: Scripted) -> None:
    """A null content is recorded as "", which matches it; the client sees what vLLM sent."""
    vllm.change = lambda answer: answer["choices"][0]["message"].update(content=None)
    found = await generate(upstream)
    assert found.generation.message["content"] == ""
    assert found.completion["choices"][0]["message"]["content"] is None


async def test_weight_versions(upstream: VLLMEngine, vllm: Scripted) -> None:
    """The versions of the weights are recorded if vLLM says them."""
    versions = [{"version": "3", "start": 0, "end": 3}]
    vllm.change = lambda answer: answer["choices"][0].update(weight_versions=versions)
    assert (await generate(upstream)).generation.meta["weight_versions"] == versions


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
async def test_routed_experts(upstream: VLLMEngine, vllm: Scripted, dtype: type) -> None:
    """The rows of an .npy payload come out as they are, whatever their type; nothing asks for them."""
    rows = replay_rows(0, 22, 3, 2)
    vllm.change = lambda answer: answer["choices"][0].update(routed_experts=npy(rows.astype(dtype)))
    for wanted in (Wanted(), Wanted(layers=3)):
        found = await generate(upstream, wanted)
        assert np.array_equal(found.replay["routed_experts"].values, rows)
        assert found.replay["routed_experts"].values.dtype == np.uint8
        assert "routed_experts" not in found.completion["choices"][0]
    assert "return_routed_experts" not in vllm.bodies[0]
    assert (await generate(upstream)).replay == {}


def _choice(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer["choices"][0].update(changes)


def _answer(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer.update(changes)


def _shaped(*shape: int) -> str:
    """An .npy payload of 132 values that says it has this shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": shape})
    return base64.b64encode(file.getvalue() + bytes(4 * 132)).decode()


LOGPROBS = [{"logprob": -0.5}] * 2
BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "prompt ignored": (_answer(prompt_token_ids=[1, 2]), "ignores kv_transfer_params.prompt_token_ids"),
    "prompt missing": (_answer(prompt_token_ids=None), "prompt_token_ids is missing"),
    "no ids": (_choice(token_ids=None), "token_ids is missing"),
    "ids of text": (_choice(token_ids=["a", "b", "c"]), "not a token id"),
    "ids nested": (_choice(token_ids=[[1], [2], [3]]), "not a token id"),
    "too few ids": (_choice(token_ids=[7]), "usage.completion_tokens says 3"),
    "no log-probs": (_choice(logprobs=None), r"logprobs.content is missing"),
    "too few log-probs": (_choice(logprobs={"content": LOGPROBS}), "2 entries, token_ids 3"),
    "no log-prob": (_choice(logprobs={"content": [{}] * 3}), "objects with a logprob"),
    "NaN": (_choice(logprobs={"content": [{"logprob": float("nan")}] * 3}), "output token 0 is nan"),
    "content a number": (_choice(message={"content": 5}), "string or null"),
    "rows of another shape": (
        _choice(routed_experts=npy(replay_rows(0, 21, 3, 2))),
        r"shape \[21, 3, 2\], but 22 rows were expected",
    ),
    "two dimensions": (_choice(routed_experts=npy(np.zeros((22, 3), np.uint8))), r"shape is \[22, 3\]"),
    "other layers": (_choice(routed_experts=npy(replay_rows(0, 22, 4, 2))), "4 layers, but --replay-layers"),
    "not .npy": (_choice(routed_experts="AAAA"), "not an .npy file"),
    "a shape below 0": (
        _choice(routed_experts=_shaped(22, -3, -2)),
        r"says that its shape is \[22, -3, -2\]",
    ),
    "a shape beyond 64 bits": (_choice(routed_experts=_shaped(22, 2**62 + 3, 2)), "says that its shape is"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_answers(upstream: VLLMEngine, vllm: Scripted, name: str) -> None:
    """An answer that cannot be recorded exactly is 502 and says what is wrong."""
    vllm.change, mention = BAD[name]
    with pytest.raises(EngineReplyInvalid, match=mention):
        await generate(upstream, Wanted(layers=3))


async def test_abort(upstream: VLLMEngine, vllm: Scripted) -> None:
    """A generation that vLLM interrupted is not recorded, and may be sent again."""
    vllm.change = _choice(finish_reason="abort")
    with pytest.raises(GenerationAborted):
        await generate(upstream)
