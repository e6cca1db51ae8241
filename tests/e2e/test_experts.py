"""A mixture-of-experts model whose routing is recorded and recomputed; weights that change meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.support.processes import Fleet, fleet, free_port, wait_for
from tokentape_cli.demo.verify import TOLERANCE, load_model
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_driver import RolloutSample, TokentapeClient, rollout, verify
from tokentape_engine.weights import perturb

LAYERS = 2
STOPS = list(range(300, 4000, 16))
"""Enough stop tokens that a model with random weights ends its turns by itself after some twenty tokens."""
LONG = 600
"""Tokens of a generation that is still running half a second later."""
PINS = {"stop_token_ids": STOPS, "temperature": 1.0, "max_tokens": 256}

pytestmark = pytest.mark.slow


@dataclass
class Engine:
    """A system around the reference engine with experts, and copies of the weights that it has had."""

    fleet: Fleet
    updates: list[tuple[int, float]] = field(default_factory=list)
    version: int = 1
    apis: dict[str, str] = field(default_factory=dict)

    async def update(self, seed: int, scale: float = 0.05, **fields: Any) -> dict[str, Any]:
        """Changes the weights, which from now on have the next version."""
        body = {"seed": seed, "scale": scale, **fields}
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            reply = await http.post(f"{self.fleet.engine_url}/update_weights", json=body)
        answer: dict[str, Any] = reply.raise_for_status().json()
        self.updates.append((seed, scale))
        self.version += 1
        assert answer["weight_version"] == str(self.version)
        return answer

    def api(self, mode: str) -> str:
        """The URL of an API process that asks for rows in this way."""
        if mode not in self.apis:
            rows, prefix = mode.split()
            options = ("--replay", rows, "--replay-layers", str(LAYERS), "--replay-prefix", prefix)
            self.apis[mode] = self.fleet.api(*options)[1]
        return self.apis[mode]

    def model(self, version: int) -> Any:
        """The weights of this version."""
        network = load_model(str(self.fleet.tokenizer))
        for seed, scale in self.updates[: version - 1]:
            perturb(network, seed, scale)
        return network


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine and one worker; the API processes are started by `url`."""
    folder, port = tmp_path_factory.mktemp("experts"), free_port()
    model = folder / "model"
    with (
        EmbeddedValkey() as valkey,
        fleet(valkey.url, f"http://127.0.0.1:{port}", model, folder) as running,
    ):
        process = running.tokentape(
            *("engine", "--port", str(port), "--model", "moe", "--train-steps", "0"),
            *("--model-dir", str(model)),
        )
        wait_for(f"{running.engine_url}/health", process, timeout_s=110)
        running.assembler()
        yield Engine(running)


@pytest.fixture(
    scope="module",
    params=[
        "incremental latest",
        "full latest",
        pytest.param("full recorded", marks=pytest.mark.slow),
    ],
)
def mode(request: pytest.FixtureRequest) -> str:
    """How rows are asked for, and of which turn a row is taken."""
    return str(request.param)


@pytest.fixture(scope="module")
def url(engine: Engine, mode: str) -> str:
    return engine.api(mode)


@pytest.fixture(scope="module")
def incremental_url(engine: Engine) -> str:
    return engine.api("incremental latest")


@dataclass
class Talker:
    """Says something in every turn, and calls `between` after the first."""

    turns: int = 3
    between: Callable[[], Awaitable[object]] | None = None

    async def __call__(self, base_url: str, _: Any) -> None:
        messages: list[Any] = []
        async with openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            for turn in range(self.turns):
                messages.append({"role": "user", "content": f"question {turn}"})
                reply = await client.chat.completions.create(model="reference", messages=messages)
                assert "routed_experts" not in reply.model_dump_json()
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                if turn == 0 and self.between is not None:
                    await self.between()


def chosen(model: Any, tokens: list[int]) -> np.ndarray:
    """What a teacher-forced pass chooses, int64[T - 1, L, K], as transformers itself reports it."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    return torch.stack([layer.softmax(-1).topk(2).indices for layer in logits], 1).numpy()


async def test_routing_equals_a_teacher_forced_pass(url: str, engine: Engine) -> None:
    """Every sample's routing is what one pass over it chooses; a row further, its log-probs are wrong."""
    async with TokentapeClient(url) as client:
        samples = await asyncio.gather(
            *(rollout(Talker(), RolloutSample(index=i), client=client, pins=PINS) for i in range(6))
        )
    model = engine.model(engine.version)
    for sample in samples:
        assert "agent_error" not in sample.metadata
        assert len(sample.metadata["lifecycle"]) == 3
        rows = sample.rollout_routed_experts
        assert rows is not None
        assert rows.dtype == np.int32
        assert np.array_equal(rows, chosen(model, sample.tokens))
        found = verify(sample, model)
        assert found.largest <= TOLERANCE
        assert found.routing_changed == 0
        shifted = replace(sample, rollout_routed_experts=np.roll(rows, 1, axis=0))
        assert verify(shifted, model).largest > TOLERANCE


async def test_a_weight_update_between_turns(url: str, mode: str, engine: Engine) -> None:
    """The versions name the weights of each turn, and `--replay-prefix` says whose routing is replayed.

    The last turn's rows replay the last turn's pass, on the new weights; rows as they were recorded replay
    the first turn's, on the old ones.
    """
    old = engine.version
    async with TokentapeClient(url) as client:
        talker = Talker(turns=2, between=lambda: engine.update(seed=old))
        sample = await rollout(talker, RolloutSample(), client=client, pins=PINS)
    assert sample.weight_versions == [str(old), str(old + 1)]
    spans = sample.metadata["weight_version_spans"]
    assert [span["version"] for span in spans] == sample.weight_versions
    assert sample.loss_mask is not None
    masks = []
    for span in spans:
        mask = [0] * len(sample.loss_mask)
        mask[span["start"] : span["end"]] = [1] * (span["end"] - span["start"])
        masks.append(mask)
    assert np.array_equal(np.sum(masks, 0), sample.loss_mask)
    turns = [replace(sample, loss_mask=mask) for mask in masks]
    replayed = 1 if mode == "full latest" else 0
    assert verify(turns[replayed], engine.model(old + replayed)).largest <= TOLERANCE
    assert verify(turns[replayed], engine.model(old + 1 - replayed)).largest > TOLERANCE


async def test_an_aborted_generation_is_retried(incremental_url: str, engine: Engine) -> None:
    """An update that aborts: nothing is recorded, 503 and retryable; the SDK's own retry then succeeds."""
    old = engine.version
    async with (
        TokentapeClient(incremental_url) as driver,
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
    ):
        session = await driver.open_session(pins={"max_tokens": LONG, "ignore_eos": True})
        body = {"messages": [{"role": "user", "content": "go on for a long while"}]}
        plain = asyncio.create_task(http.post(f"{session.openai_base_url}/chat/completions", json=body))
        await asyncio.sleep(0.5)
        assert (await engine.update(seed=1, abort_all_requests=True))["aborted"] == 1
        refused = await plain
        assert refused.status_code == 503
        assert refused.headers["x-should-retry"] == "true"
        assert refused.json()["error"]["code"] == "generation_aborted"
        async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key="-", max_retries=2) as client:
            retried = asyncio.create_task(client.chat.completions.create(model="m", **body))
            await asyncio.sleep(0.5)
            assert (await engine.update(seed=2, abort_all_requests=True))["aborted"] == 1
            assert (await retried).choices[0].finish_reason == "length"
        sample = (await session.collect_samples(RolloutSample())).samples[0]
    assert sample.weight_versions == [str(old + 2)]
    assert verify(sample, engine.model(engine.version)).largest <= TOLERANCE


async def test_an_update_during_a_generation(incremental_url: str, engine: Engine) -> None:
    """Without an abort the generation goes on with the new weights, and two spans say where they changed."""
    old = engine.version
    async with (
        TokentapeClient(incremental_url) as driver,
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
    ):
        session = await driver.open_session(pins={"max_tokens": LONG, "ignore_eos": True})
        body = {"messages": [{"role": "user", "content": "go on for a long while"}]}
        reply = asyncio.create_task(http.post(f"{session.openai_base_url}/chat/completions", json=body))
        await asyncio.sleep(0.5)
        await engine.update(seed=old)
        (await reply).raise_for_status()
        sample = (await session.collect_samples(RolloutSample())).samples[0]
    assert sample.weight_versions == [str(old + 1)]
    first, second = sample.metadata["weight_version_spans"]
    assert (first["version"], second["version"]) == (str(old), str(old + 1))
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], LONG)
    assert first["end"] > 0
