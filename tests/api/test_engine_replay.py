"""Routing replay payloads of SGLang: what is asked for, what comes out, and what is refused."""

import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.support.scripted import ScriptedEngine, network, replay_rows
from tokentape_api.engine import Generated, SGLangEngine, Wanted
from tokentape_contracts.errors import EngineReplyInvalid

PROMPT = np.arange(10, 30, dtype=np.int32)
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
EXPERTS = Wanted(layers=3)
INDEXER = Wanted()


@pytest.fixture
async def upstream(engine: ScriptedEngine) -> AsyncIterator[SGLangEngine]:
    engine.experts, engine.indexer = (3, 2), (4, 5)
    upstream = SGLangEngine("http://engine", timeout_s=5.0, **network(engine.handle))
    yield upstream
    await upstream.close()


async def generate(
    upstream: SGLangEngine, wanted: Mapping[str, Wanted], prompt: Any = PROMPT, **fields: Any
) -> Generated:
    return await upstream.generate("s", prompt, {**REQUEST, **fields}, {}, wanted)


def positions(generated: Generated, prompt: Any = PROMPT) -> int:
    return len(prompt) + len(generated.generation.output) - 1


async def test_full_rows(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """Each token that the engine read has its row, in the smallest type; nothing else was asked for."""
    found = await generate(upstream, {"routed_experts": EXPERTS})
    rows = found.replay["routed_experts"]
    assert (list(found.replay), rows.start, rows.values.dtype) == (["routed_experts"], 0, np.uint8)
    assert np.array_equal(rows.values, replay_rows(0, positions(found), 3, 2))
    assert engine.bodies[0]["return_routed_experts"] is True
    assert {"routed_experts_start_len", "return_indexer_topk"}.isdisjoint(engine.bodies[0])


async def test_later_rows(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """Rows from a position on are asked for by that position, and say it."""
    found = await generate(upstream, {"routed_experts": Wanted(12, 3)})
    rows = found.replay["routed_experts"]
    assert rows.start == engine.bodies[0]["routed_experts_start_len"] == 12
    assert np.array_equal(rows.values, replay_rows(12, positions(found), 3, 2))


async def test_indexer(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """The indexer's choices come whole, in the number of layers that the engine says, beside the experts."""
    found = await generate(upstream, {"routed_experts": EXPERTS, "indexer_topk": INDEXER})
    assert engine.bodies[0]["return_indexer_topk"] is True
    for kind, shape in (("routed_experts", (3, 2)), ("indexer_topk", (4, 5))):
        assert np.array_equal(found.replay[kind].values, replay_rows(0, positions(found), *shape))


async def test_long_payloads(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """A payload of megabytes is the same as a short one."""
    engine.experts = (48, 8)
    prompt = np.arange(2_000, dtype=np.int32)
    found = await generate(upstream, {"routed_experts": Wanted(layers=48)}, prompt)
    expected = replay_rows(0, positions(found, prompt), 48, 8)
    assert np.array_equal(found.replay["routed_experts"].values, expected)


@pytest.mark.parametrize("sent", [None, ""])
async def test_a_payload_that_was_not_sent(
    upstream: SGLangEngine, engine: ScriptedEngine, sent: str | None
) -> None:
    """Missing, null and empty are the same: the kind is absent, and the turn is not refused for it."""
    engine.answer = lambda body: httpx.Response(
        200, json=engine.reply(body, "hi", meta={"routed_experts": sent})
    )
    assert (await generate(upstream, {"routed_experts": EXPERTS})).replay == {}
    engine.answer, engine.experts = None, None
    assert (await generate(upstream, {"routed_experts": EXPERTS})).replay == {}


async def test_the_client_cannot_ask(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """What a client sends to get routing replay payloads is dropped, or overwritten by the server's."""
    asks = {"return_routed_experts": True, "return_indexer_topk": True, "routed_experts_start_len": 3}
    found = await generate(upstream, {}, **asks)
    assert asks.keys().isdisjoint(engine.bodies[0])
    assert found.replay == {}
    await generate(upstream, {"routed_experts": EXPERTS}, **asks)
    assert engine.bodies[1].keys() & asks.keys() == {"return_routed_experts"}


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("place", ["meta", "choice", "answer", "choice.sglext", "answer.sglext"])
async def test_the_answer_is_stripped(
    upstream: SGLangEngine, engine: ScriptedEngine, place: str, size: int
) -> None:
    """Payloads reach neither the client nor the record, asked for or not, wherever an engine puts them."""
    bulk: dict[str, Any] = dict.fromkeys(("routed_experts", "indexer_topk"), "AAAA" * size)
    where, _, inner = place.partition(".")
    changes = {where: {inner: bulk} if inner else bulk}
    engine.answer = lambda body: httpx.Response(200, json=engine.reply(body, "hi", **changes))
    found = await generate(upstream, {})
    for part in (found.completion, found.generation.reply, found.generation.meta):
        text = orjson.dumps(part)
        assert b"routed_experts" not in text
        assert b"indexer_topk" not in text
    assert found.completion["choices"][0]["message"]["content"] == "hi"


async def test_a_model_that_talks_about_payloads(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """A message that quotes a payload is recorded as it is."""
    text = '{"meta_info": {"routed_experts": "' + "QUJD" * 30_000 + '"}} \\'
    engine.texts = [text]
    found = await generate(upstream, {"routed_experts": EXPERTS})
    assert found.generation.message["content"] == found.completion["choices"][0]["message"]["content"] == text
    assert len(found.replay["routed_experts"].values) == positions(found)


def b64(count: int) -> str:
    return base64.b64encode(np.zeros(count, np.int32).tobytes()).decode()


REPLY_ROWS = 21
"""Rows of a two-token answer to PROMPT."""
REFUSED: dict[str, tuple[dict[str, Any], Wanted, str]] = {
    "not base64": ({"routed_experts": "%%%%"}, EXPERTS, "21 rows were expected, but it is not base64"),
    "not a string": ({"routed_experts": [1, 2]}, EXPERTS, "not base64"),
    "part of an integer": ({"routed_experts": "AAAA"}, EXPERTS, "4-byte integers"),
    "a row too few": (
        {"routed_experts": b64(20 * 3 * 2)},
        Wanted(layers=3),
        "120 values, which is not 21 rows of 3 layers",
    ),
    "another number of layers": ({"routed_experts": b64(21 * 3 * 2)}, Wanted(layers=4), "--replay-layers"),
    "all rows instead of the later": (
        {"routed_experts": b64(21 * 3)},
        Wanted(start=5, layers=3),
        "16 rows were expected from position 5 on.*routed_experts_start_len",
    ),
    "no row expected": ({"routed_experts": b64(6)}, Wanted(start=21, layers=3), "no row was expected"),
    "no number of layers": ({"routed_experts": b64(21 * 6)}, Wanted(), "set --replay-layers"),
    "other layers than set": (
        {"routed_experts": b64(21 * 6), "routed_experts_num_layers": 2},
        EXPERTS,
        "2 layers, but --replay-layers is 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_payloads(upstream: SGLangEngine, engine: ScriptedEngine, name: str) -> None:
    """A payload that does not fit the turn is 502: it says what was expected and what to set."""
    meta, wanted, mention = REFUSED[name]
    triples = [[-0.5, 1, None], [-0.25, 2, None]]
    counted = {"output_token_logprobs": triples, "completion_tokens": 2, **meta}
    engine.answer = lambda body: httpx.Response(200, json=engine.reply(body, "hi", meta=counted))
    with pytest.raises(EngineReplyInvalid, match=mention) as raised:
        await generate(upstream, {"routed_experts": wanted})
    assert "routed_experts" in raised.value.detail


async def test_indexer_without_its_layers(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """An indexer payload without its number of layers is refused, and no option is offered for it."""
    meta = {"indexer_topk_num_layers": None}
    engine.answer = lambda body: httpx.Response(200, json=engine.reply(body, "hi", meta=meta))
    with pytest.raises(EngineReplyInvalid, match=r"indexer_topk_num_layers.*use an engine that sends it$"):
        await generate(upstream, {"indexer_topk": INDEXER})


async def test_a_long_payload_in_a_wrong_place(upstream: SGLangEngine, engine: ScriptedEngine) -> None:
    """A payload that cannot be told from the message's own data is refused, not taken out silently."""
    call = {"function": {"name": "f", "arguments": {"routed_experts": "A" * 100_000}}}
    engine.answer = lambda body: httpx.Response(
        200, json=engine.reply(body, "hi", message={"tool_calls": [call]})
    )
    with pytest.raises(EngineReplyInvalid, match="routed_experts where none belongs"):
        await generate(upstream, {})
