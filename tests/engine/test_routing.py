"""The experts in a reply are those that the model chose: a second copy of it chooses the same."""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tokentape_engine.dialogues import SYSTEM_PROMPT
from tokentape_engine.model import TinyModel

LAYERS, TOP_K = 2, 2
Rows = list[list[list[int]]]


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4000), k=length)


def _generate(client: httpx.Client, prompt: list[int], **body: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 1} | body.pop("parameters", {})
    body = {"input_ids": prompt, "sampling_params": parameters, "return_routed_experts": True} | body
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def _rows(meta: dict[str, Any]) -> Rows:
    """The reply's `routed_experts`: rows of [layer][k]."""
    raw = base64.b64decode(meta["routed_experts"], validate=True)
    rows: Rows = np.frombuffer(raw, "<i4").reshape(-1, LAYERS, TOP_K).tolist()
    return rows


@torch.inference_mode()
def _expected(model: TinyModel, ids: list[int]) -> Rows:
    """What one pass of transformers alone over all tokens that the server's model read chooses."""
    logits = model.network(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    rows: Rows = torch.stack([each.softmax(-1).topk(TOP_K).indices for each in logits], dim=1).tolist()
    return rows


def test_cold_prompt(moe_client: httpx.Client, moe_model: TinyModel) -> None:
    """Each token but the last has a row, with the experts of every layer in the router's order."""
    prompt = _prompt(40, seed=1)
    reply = _generate(moe_client, prompt)
    assert reply["meta_info"]["cached_tokens"] == 0
    rows = _rows(reply["meta_info"])
    assert len(rows) == 40 + 12 - 1
    assert rows == _expected(moe_model, prompt + reply["output_ids"])
    assert len({expert for row in rows for layer in row for expert in layer}) == 8


def test_cached_prefix(moe_client: httpx.Client, moe_model: TinyModel) -> None:
    """Over several turns the rows of a cached prefix are those that it was computed with."""
    ids = _prompt(30, seed=2)
    for turn in range(4):
        reply = _generate(moe_client, ids)
        assert reply["meta_info"]["cached_tokens"] == (0 if turn == 0 else len(ids) - 6)
        ids += reply["output_ids"]
        assert _rows(reply["meta_info"]) == _expected(moe_model, ids)
        ids += _prompt(5, seed=100 + turn)


def test_prefix_from_another_slot(moe_client: httpx.Client, moe_model: TinyModel) -> None:
    """Two continuations of one prompt both begin with its rows."""
    prompt = _prompt(25, seed=3)
    _generate(moe_client, prompt)
    for token in (7, 8):
        reply = _generate(moe_client, [*prompt, token])
        assert reply["meta_info"]["cached_tokens"] == 25
        assert _rows(reply["meta_info"]) == _expected(moe_model, [*prompt, token, *reply["output_ids"]])


@pytest.mark.slow
def test_concurrent_requests(moe_client: httpx.Client, moe_model: TinyModel) -> None:
    """Requests of unequal lengths in one batch, more than there are slots, each get their own rows."""

    def play(n: int) -> tuple[list[int], dict[str, Any]]:
        prompt = _prompt(5 + 3 * n, seed=1000 + n)
        parameters = {"max_new_tokens": 10 + 5 * (n % 4), "sampling_seed": n}
        return prompt, _generate(moe_client, prompt, parameters=parameters)

    with ThreadPoolExecutor(24) as pool:
        for prompt, reply in pool.map(play, range(24)):
            assert _rows(reply["meta_info"]) == _expected(moe_model, prompt + reply["output_ids"])


@pytest.mark.parametrize("start", [0, 1, 19, 20])
def test_start_len_leaves_out_the_first_rows(
    moe_client: httpx.Client, moe_model: TinyModel, start: int
) -> None:
    """With `routed_experts_start_len` the rows are the tail of all rows, up to those of the output alone."""
    prompt = _prompt(20, seed=4)
    reply = _generate(moe_client, prompt, routed_experts_start_len=start)
    rows = _rows(reply["meta_info"])
    assert len(rows) == 20 + 12 - 1 - start
    assert rows == _expected(moe_model, prompt + reply["output_ids"])[start:]


def test_no_row_for_a_token_that_was_not_read(moe_client: httpx.Client) -> None:
    """One output token after the whole prompt was left out: no row, but the field."""
    reply = _generate(moe_client, [1, 2, 3], parameters={"max_new_tokens": 1}, routed_experts_start_len=3)
    assert reply["meta_info"]["routed_experts"] == ""


def test_chat(moe_client: httpx.Client, moe_model: TinyModel) -> None:
    """A chat that is rendered by the server has the rows in its `meta_info`, when it asks for them."""
    body = {
        "messages": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "seed": 1,
        "return_meta_info": True,
        "return_token_ids": True,
    }
    choice = moe_client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert "routed_experts" not in choice["meta_info"]
    body["return_routed_experts"] = True
    choice = moe_client.post("/v1/chat/completions", json=body).json()["choices"][0]
    ids = choice["prompt_token_ids"] + choice["response_token_ids"]
    assert _rows(choice["meta_info"]) == _expected(moe_model, ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"return_routed_experts": 1}, "return_routed_experts must be true or false"),
        ({"routed_experts_start_len": 4}, "from 0 to the 3 prompt tokens, got 4"),
        ({"routed_experts_start_len": -1}, "from 0 to the 3 prompt tokens, got -1"),
        ({"routed_experts_start_len": True}, "got True"),
        ({"routed_experts_start_len": "0"}, "got '0'"),
        ({"return_indexer_topk": True}, "return_indexer_topk=True is not supported"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_bad_requests(moe_client: httpx.Client, path: str, change: dict[str, Any], reason: str) -> None:
    """A start outside the prompt, and an indexer that the model does not have, are 400."""
    body = {"input_ids": [1, 2, 3], "messages": [], "return_meta_info": True, "return_routed_experts": True}
    answer = moe_client.post(path, json=body | change)
    assert answer.status_code == 400
    assert reason in answer.json()["message"]


def test_chat_without_meta_info_has_no_place_for_experts(moe_client: httpx.Client) -> None:
    """A chat that asks for experts but not for `meta_info` is 400."""
    body = {"input_ids": [1], "messages": [], "return_routed_experts": True}
    answer = moe_client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "needs return_meta_info" in answer.json()["message"]


def test_dense_model_has_no_experts(client: httpx.Client) -> None:
    """A dense model answers a request for experts with 400 that says why."""
    for path in ("/v1/chat/completions", "/generate"):
        body = {"input_ids": [1], "messages": [], "return_meta_info": True, "return_routed_experts": True}
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "this model is dense" in answer.json()["message"]
