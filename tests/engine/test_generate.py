"""The generator's thread: it ends in order, forgets cancelled work and survives errors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing

import pytest
import torch

from tokentape_engine import generate
from tokentape_engine.generate import SLOTS, Generator, QueueFullError
from tokentape_engine.model import TinyModel
from tokentape_engine.sampling import Sampling
from tokentape_engine.slots import SlotCache

ENDLESS = Sampling(max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def random_model() -> TinyModel:
    """A model with random weights, where every token of the prompt matters."""
    return TinyModel.create(seed=1)


@pytest.fixture
def generator(random_model: TinyModel) -> Iterator[Generator]:
    """A generator that is closed after the test."""
    generator = Generator(random_model.network, random_model.tokenizer, random_model.eos_token_ids, 4096)
    yield generator
    generator.close()


def test_cancelled_request_frees_its_slot(generator: Generator) -> None:
    """Cancelling as many endless requests as there are slots lets the next one through."""
    endless = [generator.submit([n + 1], ENDLESS) for n in range(SLOTS)]
    waiting = generator.submit([1, 2, 3], Sampling(max_tokens=3, ignore_eos=True))
    assert all(future.cancel() for future in endless)
    assert len(waiting.result(timeout=30).tokens) == 3


def test_close_fails_what_still_runs(generator: Generator) -> None:
    """Closing ends running and waiting requests with an error, and refuses new ones."""
    futures = [generator.submit([1], ENDLESS) for _ in range(SLOTS + 3)]
    generator.close()
    assert wait(futures, timeout=1).not_done == set()
    assert all(isinstance(future.exception(), RuntimeError) for future in futures)
    with pytest.raises(RuntimeError, match="closed"):
        generator.submit([1], ENDLESS)


def test_full_queue_refuses(random_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request beyond the bound of the queue is refused at once."""
    monkeypatch.setattr(generate, "MAX_WAITING", 2)
    generator = Generator(random_model.network, random_model.tokenizer, (), 4096)
    with closing(generator):

        def overfill() -> None:
            for _ in range(SLOTS + 50):
                generator.submit([1], ENDLESS)

        with pytest.raises(QueueFullError, match="2 requests"):
            overfill()


def test_error_reaches_the_caller_only(generator: Generator) -> None:
    """An error inside a step fails the running requests; the next request is served."""
    broken = generator.submit([10**6], Sampling(max_tokens=1))
    assert isinstance(broken.exception(timeout=30), IndexError)
    assert len(generator.submit([1], Sampling(max_tokens=1)).result(timeout=30).tokens) == 1


def test_batch_of_unequal_lengths(random_model: TinyModel) -> None:
    """Sequences of different lengths in one step, in used slots, get the logits of each one alone."""
    cache = SlotCache(random_model.network, slots=3, context_length=64)
    stale, _ = cache.acquire([5] * 20)
    cache.extend([stale], [[5] * 20])
    cache.release(stale)
    prompts = [[1, 2, 3, 4, 5], [7], [1, 2, 3, 9]]
    slots = []
    for prompt in prompts:
        slot, cached = cache.acquire(prompt)
        cache.extend([slot], [prompt[cached:]])
        slots.append((slot, cached))
    assert [cached for _, cached in slots] == [0, 0, 3]
    logits = cache.extend([slot for slot, _ in slots], [[11], [12], [13]])
    for prompt, token, row in zip(prompts, (11, 12, 13), logits, strict=True):
        with torch.inference_mode():
            alone = random_model.network(torch.tensor([[*prompt, token]])).logits[0, -1]
        assert torch.allclose(row, alone, atol=1e-4)
