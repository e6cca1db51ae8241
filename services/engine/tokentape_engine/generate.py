"""Continuous batching: one thread that steps all running sequences together.

Requests join and leave between steps. Each step is one forward pass over all running sequences, one token
each; a sequence that joins is first read in (its prompt, without what the cache already holds).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tokentape_engine.sampling import Sampling, draw, scale
from tokentape_engine.slots import SlotCache

SLOTS = 16
"""Sequences that run at once, and earlier sequences that the prefix cache can remember."""

MAX_WAITING = 1024
"""Requests that may wait for a slot; one more is refused."""

_STOP_MARGIN_TOKENS = 8
"""The text that is searched for a stop string begins this much earlier, so as to begin before a character."""


class QueueFullError(Exception):
    """Too many requests are waiting; the caller should come back later."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request generated.

    `tokens` are all sampled ids, with the one that stopped it; `logprobs` are theirs, at the request's
    temperature. `matched_stop` is the stop token's id or the stop string, None after `length`.
    `cached_tokens` is how many leading prompt tokens were not computed again. `latency_s` counts from
    submission, with the wait for a slot.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    matched_stop: int | str | None
    cached_tokens: int
    latency_s: float


@dataclass(slots=True)
class _Sequence:
    prompt: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    generator: torch.Generator
    future: Future[Completion]
    submitted: float
    slot: int = -1
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Generator:
    """Generates completions of token ids. Thread-safe; `close` ends its thread and fails what still runs.

    The draws of a request with a seed depend on that seed only. Batching changes logits in the last bits of a
    float32, so in rare cases two runs with the same seed still part ways.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: Iterable[int],
        context_length: int,
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._unseeded = torch.Generator().manual_seed(seed)
        self._cache = SlotCache(model, SLOTS, context_length)
        # None wakes the thread up to end it.
        self._waiting: queue.Queue[_Sequence | None] = queue.Queue(MAX_WAITING)
        self._running: list[_Sequence] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], sampling: Sampling) -> Future[Completion]:
        """Queue a request. Cancelling the future ends the generation at the next step.

        The caller has checked that ids are in the vocabulary and that prompt and output fit the context.
        Raises `QueueFullError`, or `RuntimeError` after `close`.
        """
        if self._closed.is_set():
            raise RuntimeError("the generator is closed")
        seeded = sampling.seed is not None
        generator = torch.Generator().manual_seed(sampling.seed or 0) if seeded else self._unseeded
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self._eos)
        sequence = _Sequence(prompt, sampling, stop_ids, generator, Future(), time.monotonic())
        try:
            self._waiting.put_nowait(sequence)
        except queue.Full:
            raise QueueFullError(f"{MAX_WAITING} requests are waiting already") from None
        return sequence.future

    def close(self) -> None:
        """End the thread; requests that have not finished fail with `RuntimeError`. May be called twice."""
        self._closed.set()
        # With a full queue the thread is busy anyway, and sees the flag after its step.
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join()

    def _run(self) -> None:
        # Set for the thread that computes. In so small a model more threads only wait for each other.
        torch.set_num_threads(1)
        while not self._closed.is_set():
            try:
                self._admit()
                self._step()
            except Exception as error:
                # A bug must reach the callers, and must not end the thread: they would wait for ever.
                for sequence in list(self._running):
                    self._leave(sequence, error)
        closing = RuntimeError("the generator was closed")
        for sequence in list(self._running):
            self._leave(sequence, closing)
        while not self._waiting.empty():
            if (left := self._waiting.get()) is not None:
                _resolve(left.future, closing)

    def _admit(self) -> None:
        """Move requests from the queue into idle slots; waits for one when there is nothing else to do."""
        while self._cache.idle:
            try:
                sequence = self._waiting.get(block=not self._running)
            except queue.Empty:
                return
            if sequence is None:
                return
            if not sequence.future.cancelled():
                sequence.slot, sequence.cached = self._cache.acquire(sequence.prompt)
                self._running.append(sequence)
                logits = self._cache.extend([sequence.slot], [sequence.prompt[sequence.cached :]])
                self._take(sequence, logits[0])

    def _step(self) -> None:
        for sequence in list(self._running):
            if sequence.future.cancelled():
                self._leave(sequence, None)
        if not self._running:
            return
        batch = list(self._running)
        logits = self._cache.extend([each.slot for each in batch], [each.tokens[-1:] for each in batch])
        for sequence, row in zip(batch, logits, strict=True):
            self._take(sequence, row)

    @torch.inference_mode()
    def _take(self, sequence: _Sequence, logits: Tensor) -> None:
        """Draw the sequence's next token; the sequence leaves if that was its last."""
        logprobs = scale(logits, sequence.sampling.temperature)
        token = draw(logprobs, sequence.sampling, sequence.generator)
        sequence.tokens.append(token)
        sequence.logprobs.append(float(logprobs[token]))
        matched = token if token in sequence.stop_ids else self._stop_string(sequence)
        finish: Literal["stop", "length"] = "length" if matched is None else "stop"
        if matched is not None or len(sequence.tokens) >= sequence.sampling.max_tokens:
            latency_s = time.monotonic() - sequence.submitted
            done = Completion(sequence.tokens, sequence.logprobs, finish, matched, sequence.cached, latency_s)
            self._leave(sequence, done)

    def _stop_string(self, sequence: _Sequence) -> str | None:
        """The stop string that the newest token completed, if any."""
        if not sequence.sampling.stop:
            return None
        # Each token is at least one byte, so this many tokens hold the longest stop string.
        tail = _STOP_MARGIN_TOKENS + max(len(text.encode()) for text in sequence.sampling.stop)
        text = self._tokenizer.decode(sequence.tokens[-tail:])
        return next((stop for stop in sequence.sampling.stop if stop in text), None)

    def _leave(self, sequence: _Sequence, outcome: Completion | Exception | None) -> None:
        self._running.remove(sequence)
        self._cache.release(sequence.slot)
        _resolve(sequence.future, outcome)


def _resolve(future: Future[Completion], outcome: Completion | Exception | None) -> None:
    # It may be cancelled at this very moment: then nobody waits for the outcome.
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)
