"""Weights change between steps: log-probs, versions, the prefix cache and aborted requests tell the truth."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor
from transformers import DynamicCache

from tokentape_engine.app import build_app
from tokentape_engine.generate import SLOTS, Generator
from tokentape_engine.model import TinyModel
from tokentape_engine.sampling import Sampling
from tokentape_engine.sequence import Completion
from tokentape_engine.slots import SlotCache
from tokentape_engine.weights import UnknownVersionError, Updated, WeightUpdate, perturb

MAX_LOGPROB_ERROR = 1e-4
PROMPT = list(range(100, 130))
SHORT = Sampling(max_tokens=1, ignore_eos=True)
ENDLESS = Sampling(max_tokens=4000, ignore_eos=True)


def _model() -> TinyModel:
    return TinyModel.create(seed=2, kind="moe")


@pytest.fixture
def generator() -> Iterator[Generator]:
    """A generator whose weights are the test's own."""
    model = _model()
    generator = Generator(model.network, model.tokenizer, model.eos_token_ids, 4096)
    yield generator
    generator.close()


@pytest.fixture
def client() -> Iterator[TestClient]:
    """The application in this process, with weights of the test's own."""
    with TestClient(build_app(_model())) as client:
        yield client


def _generate(client: TestClient, **parameters: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": 20, "ignore_eos": True} | parameters
    body = {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def _update(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/update_weights", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def _error(logits: Tensor, output: list[int], logprobs: list[float]) -> float:
    """Largest difference of reported log-probs to those of `logits`: float32[output, vocab]."""
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((torch.tensor(logprobs) - expected).abs().max())


@torch.inference_mode()
def _forced_error(model: TinyModel, reply: dict[str, Any]) -> float:
    output = reply["output_ids"]
    logits = model.network(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    return _error(logits, output, [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]])


def test_perturb_is_relative_and_repeatable() -> None:
    """Equal seeds change two copies equally, by `scale` of each tensor's size; scale 0 changes nothing."""
    before, one, two, other, same = (_model().network for _ in range(5))
    for network, seed, scale in ((one, 5, 0.01), (two, 5, 0.01), (other, 6, 0.01), (same, 5, 0.0)):
        perturb(network, seed, scale)
    for old, a, b, c, d in zip(*(n.parameters() for n in (before, one, two, other, same)), strict=True):
        assert a.equal(b)
        assert not a.equal(c)
        assert d.equal(old)
        assert float(((a - old).norm() / old.norm()).detach()) == pytest.approx(0.01, rel=0.5)


def test_update_changes_logprobs_to_those_of_a_perturbed_copy(client: TestClient) -> None:
    """After each update log-probs are those of a copy that followed it, and no longer those before."""
    copy = _model()
    for number, seed in enumerate((7, 8), start=2):
        assert _forced_error(copy, _generate(client)) < MAX_LOGPROB_ERROR
        reply = _update(client, weight_version=str(number), seed=seed, scale=0.05)
        assert reply == {"success": True, "weight_version": str(number), "aborted": 0}
        after = _generate(client)
        assert _forced_error(copy, after) > 100 * MAX_LOGPROB_ERROR
        perturb(copy.network, seed, 0.05)
        assert _forced_error(copy, after) < MAX_LOGPROB_ERROR
        meta = after["meta_info"]
        assert meta["weight_version"] == str(number)
        assert meta["weight_versions"] == [{"version": str(number), "start": 0, "end": 20}]


def test_versions_count_on(client: TestClient) -> None:
    """Without a version it is one more; after a version that is no number it must be said."""
    assert _generate(client)["meta_info"]["weight_version"] == "1"
    assert [_update(client)["weight_version"] for _ in range(2)] == ["2", "3"]
    assert _update(client, weight_version="step-10")["weight_version"] == "step-10"
    answer = client.post("/update_weights", json={})
    assert answer.status_code == 400
    assert "'step-10', is not a number" in answer.json()["message"]
    assert _generate(client)["meta_info"]["weight_version"] == "step-10"


def test_update_empties_the_prefix_cache(client: TestClient) -> None:
    """The first request after an update computes its whole prompt, the second reuses the first's."""
    cached = []
    for before in (None, None, {"scale": 0}, None):
        if before is not None:
            _update(client, **before)
        cached.append(_generate(client)["meta_info"]["cached_tokens"])
    assert cached == [0, len(PROMPT) - 1, 0, len(PROMPT) - 1]


def test_forgotten_slot_is_not_shared_by_what_runs_in_it() -> None:
    """A sequence that goes on after the cache has forgotten is shared neither while it runs nor later."""
    cache = SlotCache(_model().network, slots=3, context_length=64)
    running, _ = cache.acquire([1, 2, 3, 4])
    cache.extend([running], [[1, 2, 3]])
    cache.forget()
    cache.extend([running], [[4]])
    second, cached = cache.acquire([1, 2, 3, 4, 5])
    assert cached == 0
    cache.extend([second], [[1, 2]])
    cache.release(running)
    assert cache.acquire([1, 2, 3, 4, 5])[1] == 2


def _start(generator: Generator, sampling: Sampling, experts_from: int | None = None) -> Future[Completion]:
    """Submit, and come back when it runs: a request behind it has been served."""
    future = generator.submit(PROMPT, sampling, experts_from)
    generator.submit([1], SHORT).result(timeout=30)
    return future


@torch.inference_mode()
def test_update_in_mid_generation(generator: Generator) -> None:
    """Tokens before and after an update are the old and the new weights', over the old keys and values."""
    long = _start(generator, Sampling(max_tokens=300, ignore_eos=True), experts_from=0)
    assert generator.update(WeightUpdate(seed=3, scale=0.1)).result(timeout=30) == Updated("2", 0)
    done = long.result(timeout=60)
    old_tokens = done.token_versions.count("1")
    assert done.token_versions == ["1"] * old_tokens + ["2"] * (300 - old_tokens)
    assert 0 < old_tokens < 300
    assert (done.weight_version, done.finish) == ("2", "length")
    assert done.experts is not None
    assert done.experts.shape == (len(PROMPT) + 299, 2, 2)

    old, new = _model().network, _model().network
    perturb(new, 3, 0.1)
    ids = torch.tensor([PROMPT + done.tokens[:-1]])
    read = len(PROMPT) + old_tokens - 1
    cache = DynamicCache(config=old.config)
    before = old(ids[:, :read], None, None, cache, use_cache=True)
    after = new(ids[:, read:], None, None, cache, use_cache=True)
    logits = torch.cat([before.logits, after.logits], dim=1)[0, len(PROMPT) - 1 :]
    assert _error(logits, done.tokens, done.logprobs) < MAX_LOGPROB_ERROR


def test_spans_in_the_reply(client: TestClient) -> None:
    """A reply lists which output tokens each version drew, without a gap, and the last version."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(_generate, client, max_new_tokens=100)
        while not reply.done():
            _update(client, scale=0.001)
    meta = reply.result()["meta_info"]
    spans = meta["weight_versions"]
    assert len(spans) > 1
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert all(span["start"] < span["end"] for span in spans)
    assert spans[-1]["end"] == 100
    versions = [int(span["version"]) for span in spans]
    assert versions == sorted(set(versions))
    assert meta["weight_version"] == spans[-1]["version"]


def test_abort_ends_all(generator: Generator) -> None:
    """Running generations end with what they have, waiting ones with nothing, and the next is served."""
    running = [_start(generator, ENDLESS, experts_from=0)]
    running += [generator.submit([n + 1], ENDLESS) for n in range(SLOTS - 1)]
    waiting = [generator.submit([1], ENDLESS, 0) for _ in range(3)]
    update = generator.update(WeightUpdate(version="9", abort_all=True))
    assert update.result(timeout=30) == Updated("9", SLOTS + 3)
    assert not wait([*running, *waiting], timeout=1).not_done
    first = running[0].result()
    assert 0 < len(first.tokens) < ENDLESS.max_tokens
    assert first.experts is not None
    assert len(first.experts) == len(PROMPT) + len(first.tokens) - 1
    for future in (*running, *waiting):
        done = future.result()
        assert (done.finish, done.matched_stop, done.weight_version) == ("abort", None, "1")
        assert len(done.tokens) == len(done.logprobs) == len(done.token_versions)
    assert [future.result().tokens for future in waiting] == [[], [], []]
    assert [future.result().experts for future in waiting] == [None, None, None]
    assert generator.submit([1], SHORT).result(timeout=30).weight_version == "9"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_aborted_reply(client: TestClient, path: str) -> None:
    """An aborted request is answered with 200, finish reason `abort` and the tokens so far."""
    body = {
        "input_ids": PROMPT,
        "messages": [],
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        "ignore_eos": True,
        "return_meta_info": True,
        "return_routed_experts": True,
        "return_logprob": True,
        "logprobs": True,
    }
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.post, path, json=body)
        while not _update(client, abort_all_requests=True)["aborted"]:
            pass
        answer = pending.result()
    assert answer.status_code == 200
    reply = answer.json()
    if path == "/generate":
        meta, reason = reply["meta_info"], reply["meta_info"]["finish_reason"]["type"]
    else:
        [choice] = reply["choices"]
        meta, reason = choice["meta_info"], choice["finish_reason"]
        assert choice["matched_stop"] is None
    assert reason == "abort"
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) < 4000
    assert ("routed_experts" in meta) == (meta["completion_tokens"] > 0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"weight_version": ""}, "weight_version must be a non-empty string"),
        ({"weight_version": 2}, "weight_version must be a non-empty string"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"scale": "big"}, "scale must be a number"),
        ({"scale": -0.1}, "scale must be in [0, 1]"),
        ({"scale": 1.1}, "scale must be in [0, 1]"),
        ({"abort_all_requests": 1}, "abort_all_requests must be true or false"),
        ({"version": "2"}, "no such field: version"),
        ([], "must be a JSON object"),
    ],
)
def test_bad_updates(client: TestClient, body: Any, reason: str) -> None:
    """An update with a wrong field is 400 and changes nothing."""
    answer = client.post("/update_weights", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["message"]
    assert _generate(client)["meta_info"]["weight_version"] == "1"


def test_update_without_next_version(generator: Generator) -> None:
    """An update that fails leaves the weights, the version and what runs alone."""
    generator.update(WeightUpdate(version="v")).result(timeout=30)
    running = _start(generator, Sampling(max_tokens=100, ignore_eos=True))
    with pytest.raises(UnknownVersionError):
        generator.update(WeightUpdate(abort_all=True)).result(timeout=30)
    assert running.result(timeout=30).finish == "length"


def test_close_fails_updates(generator: Generator) -> None:
    """A closed generator refuses updates."""
    generator.close()
    with pytest.raises(RuntimeError, match="closed"):
        generator.update(WeightUpdate())
