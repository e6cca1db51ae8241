"""The probe's line about stop tokens: seen, left out, or not to be seen."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.scripted import network
from tokentape_api.engine import Check, SGLangEngine, VLLMEngine
from tokentape_api.engine.client import HttpEngine
from tokentape_api.engine.probe import PROMPT

END = 2
"""The end-of-turn token of `Greedy`."""


@dataclass
class Greedy:
    """An engine that always samples the same tokens, as SGLang or vLLM tell it.

    Attributes:
        tokens: what it samples; it stops at `END`, at a stop token, or at its limit.
        obeys: it knows `stop_token_ids`.
        trims: it leaves the token that stopped it out of ids and log-probs.
        counts_all: `completion_tokens` counts the token that it left out.
        again: what it samples from the second request on, if that is something else.
        refusal: its answer to a request with stop tokens, if it refuses such.
    """

    tokens: list[int] = field(default_factory=lambda: [11, 12, 11, 13, 14])
    obeys: bool = True
    trims: bool = False
    counts_all: bool = False
    again: list[int] | None = None
    refusal: httpx.Response | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.refusal is not None and "stop_token_ids" in body:
            return self.refusal
        ids, finish, count = self._sample(body)
        prompt = body.get("input_ids") or body["kv_transfer_params"]["prompt_token_ids"]
        meta = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        choice = {
            "message": {"role": "assistant", "content": "text"},
            "finish_reason": finish,
            "meta_info": meta,
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
        }
        usage = {"completion_tokens": count}
        return httpx.Response(200, json={"choices": [choice], "prompt_token_ids": prompt, "usage": usage})

    def _sample(self, body: dict[str, Any]) -> tuple[list[int], str, int]:
        tokens = self.again if self.again is not None and len(self.bodies) > 1 else self.tokens
        stops = {END, *(body.get("stop_token_ids", []) if self.obeys else [])}
        ids: list[int] = []
        for token in tokens[: body["max_tokens"]]:
            ids.append(token)
            if token in stops:
                kept = ids[:-1] if self.trims else ids
                return kept, "stop", len(ids if self.counts_all else kept)
        return ids, "length", len(ids)


@pytest.fixture(params=[SGLangEngine, VLLMEngine], ids=["sglang", "vllm"])
def adapter(request: pytest.FixtureRequest) -> type[HttpEngine]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def look(adapter: type[HttpEngine]) -> Callable[..., Any]:
    """Probes an engine with these options; gives its line about stop tokens, and the engine."""

    async def look(**options: Any) -> tuple[Check, Greedy]:
        greedy = Greedy(**options)
        engine = adapter("http://engine", timeout_s=5.0, **network(greedy.handle))
        try:
            checks = await engine.probe(5.0) or []
        finally:
            await engine.close()
        [found] = [check for check in checks if check.name == "stop token"]
        assert {check.state for check in checks if check is not found} == {"ok"}
        return found, greedy

    return look


@pytest.mark.parametrize(
    ("tokens", "stop"),
    [
        ([11, 12, 11, 13, 14], 12),
        ([11, 12, 13, 14], 13),
        ([7, 7, 7, 7], 7),
        ([11, 12, END], 12),
        ([11, END], 11),
        ([0, 1, 0, 1], 1),
    ],
    ids=repr,
)
async def test_the_stop_token_is_seen(look: Any, tokens: list[int], stop: int) -> None:
    """A second greedy generation, which a token of the first one stops, ends with that very token."""
    check, greedy = await look(tokens=tokens)
    assert check.state == "ok"
    assert check.detail == f"in the ids: {stop} stopped a generation, and is its last id"
    first, second = greedy.bodies
    assert second == {**first, "stop_token_ids": [stop]}
    assert (second["temperature"], second["max_tokens"]) == (0, 4)


@pytest.mark.parametrize(
    "tokens", [[11, 12, 13, 14], [7, 7, 7, 7], [11, 12, END], [11, 12, 12, 12]], ids=repr
)
async def test_a_stop_token_that_is_left_out(look: Any, tokens: list[int]) -> None:
    """An engine whose ids end before the stop token is not usable, and the line says what is lost."""
    check, _ = await look(tokens=tokens, trims=True)
    assert check.state == "wrong"
    assert "is not in its ids: no sample would show how a turn ends" in check.detail


async def test_a_generation_of_its_stop_token_alone(look: Any) -> None:
    """A generation that stopped without any id lost the token that stopped it; no second one is needed."""
    check, greedy = await look(tokens=[END], trims=True)
    assert (check.state, len(greedy.bodies)) == ("wrong", 1)
    assert "stopped without a single id" in check.detail


async def test_a_stop_token_that_is_counted_and_not_sent(look: Any) -> None:
    """An engine that counts the token which it leaves out breaks a rule that holds for every turn."""
    check, _ = await look(tokens=[11, 12, 13, 14], trims=True, counts_all=True)
    assert check.state == "wrong"
    assert "completion_tokens says 3" in check.detail


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"obeys": False}, "token 13 did not stop a generation; does the engine ignore stop_token_ids?"),
        ({"again": [11, 13, 12, 14]}, "gave other tokens at temperature 0"),
        ({"again": [11, 14, 14, 14]}, "token 13 did not stop a generation"),
        ({"refusal": httpx.Response(400, text="no stop_token_ids here")}, "400: no stop_token_ids here"),
    ],
    ids=["ignores stop tokens", "is not deterministic", "comes by no stop token", "refuses them"],
)
async def test_where_it_cannot_be_seen(look: Any, options: Any, mention: str, trims: bool) -> None:
    """An engine that does not let it be seen passes, and the line says that it was not seen and why."""
    check, _ = await look(tokens=[11, 12, 13, 14], trims=trims, **options)
    assert check.state == "ok"
    assert check.detail.startswith("not seen: ")
    assert mention in check.detail


@pytest.mark.parametrize(
    ("tokens", "trims"), [([END], False), ([11, END], True), ([], False)], ids=["end", "one", "none"]
)
async def test_too_few_tokens(look: Any, tokens: list[int], trims: bool) -> None:
    """Of one token no beginning can be stopped, so that nothing is asked and nothing is seen."""
    check, greedy = await look(tokens=tokens, trims=trims)
    assert (check.state, len(greedy.bodies)) == ("ok", 1)
    assert check.detail == "not seen: the generation has too few tokens to stop a second one"


async def test_an_engine_that_stops_by_itself(look: Any) -> None:
    """That an engine stops at its own token is not taken for obedience: it must stop where it was told."""
    check, _ = await look(tokens=[11, 12, END], obeys=False)
    assert check.detail == "not seen: the same prompt gave other tokens at temperature 0"


async def test_a_broken_answer_to_the_second_request(adapter: type[HttpEngine]) -> None:
    """If the second generation fails, the engine is not taken for good."""
    greedy = Greedy(refusal=httpx.Response(200, json={"choices": []}))
    engine = adapter("http://engine", timeout_s=5.0, **network(greedy.handle))
    checks = {check.name: check for check in await engine.probe(5.0) or []}
    await engine.close()
    assert (checks["stop token"].state, "exactly one choice" in checks["stop token"].detail) == (
        "wrong",
        True,
    )
    assert greedy.bodies[0].get("input_ids", PROMPT.tolist()) == PROMPT.tolist()


async def test_no_line_without_ids(adapter: type[HttpEngine]) -> None:
    """Where ids or log-probs are missing there is nothing to stop, and the other lines say enough."""
    engine = adapter(
        "http://engine",
        timeout_s=5.0,
        **network(lambda _: httpx.Response(200, json={"choices": [{"finish_reason": "stop"}]})),
    )
    checks = [check.name for check in await engine.probe(5.0) or []]
    await engine.close()
    assert "ids" in checks
    assert "stop token" not in checks
