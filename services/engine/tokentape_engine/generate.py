"""Continuous batching: one thread that steps all running sequences together.

Requests join and leave between steps. Each step is one forward pass over all running sequences, one token
each; a sequence that joins is first read in (its prompt, without what the cache already holds). The weights
change between steps too, never within one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tokentape_engine.model import Network
from tokentape_engine.sampling import Sampling, draw, scale
from tokentape_engine.sequence import Completion, Finish, Sequence
from tokentape_engine.slots import SlotCache
from tokentape_engine.weights import FIRST_VERSION, Updated, WeightUpdate, next_version, perturb

SLOTS = 16
"""Sequences that run at once, and earlier sequences that the prefix cache can remember."""

MAX_WAITING = 1024
"""Requests that may wait for a slot; one more is refused."""

_STOP_MARGIN_TOKENS = 8
"""The text that is searched for a stop string begins this much earlier, so as to begin before a character."""


_Outcome = TypeVar("_Outcome")


class QueueFullError(Exception):
    """Too many requests are waiting; the caller should come back later."""


class Generator:
    """Generates completions of token ids. Thread-safe; `close` ends its thread and fails what still runs.

    From then on the thread alone uses `model`, and changes its weights when it is told to.

    The draws of a request with a seed depend on that seed only. Batching changes logits in the last bits of a
    float32, so in rare cases two runs with the same seed still part ways.
    """

    def __init__(
        self,
        model: Network,
        tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: Iterable[int],
        context_length: int,
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._unseeded = torch.Generator().manual_seed(seed)
        self._model = model
        self._version = FIRST_VERSION
        self._cache = SlotCache(model, SLOTS, context_length)
        # None wakes the thread up, to see that something else than a request came in.
        self._waiting: queue.Queue[Sequence | None] = queue.Queue(MAX_WAITING)
        self._updates: queue.SimpleQueue[tuple[WeightUpdate, Future[Updated]]] = queue.SimpleQueue()
        self._running: list[Sequence] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: list[int], sampling: Sampling, experts_from: int | None = None
    ) -> Future[Completion]:
        """Queue a request. Cancelling the future ends the generation at the next step.

        The completion holds the experts of each token from index `experts_from` on; of none if that is None.
        The caller has checked that ids are in the vocabulary and that prompt and output fit the context.
        Raises `QueueFullError`, or `RuntimeError` after `close`.
        """
        if self._closed.is_set():
            raise RuntimeError("the generator is closed")
        seeded = sampling.seed is not None
        generator = torch.Generator().manual_seed(sampling.seed or 0) if seeded else self._unseeded
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self._eos)
        sequence = Sequence(prompt, sampling, experts_from, stop_ids, generator, Future())
        try:
            self._waiting.put_nowait(sequence)
        except queue.Full:
            raise QueueFullError(f"{MAX_WAITING} requests are waiting already") from None
        return sequence.future

    def update(self, change: WeightUpdate) -> Future[Updated]:
        """Change the weights once the present step is done; later tokens are drawn from the new ones.

        Running sequences keep the keys and values that the old weights made; new ones reuse none of them.
        The future raises `UnknownVersionError` when the change names no version and none follows. Raises
        `RuntimeError` after `close`.
        """
        if self._closed.is_set():
            raise RuntimeError("the generator is closed")
        future: Future[Updated] = Future()
        self._updates.put((change, future))
        self._wake()
        return future

    def close(self) -> None:
        """End the thread; requests that have not finished fail with `RuntimeError`. May be called twice."""
        self._closed.set()
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        # With a full queue the thread is busy anyway, and looks around after its step.
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

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
            # The last of the loop: it may swallow what woke the thread up, and the flag is looked at next.
            self._update()
        closing = RuntimeError("the generator was closed")
        for sequence in [*self._running, *self._drain()]:
            self._leave(sequence, closing)
        while not self._updates.empty():
            _resolve(self._updates.get()[1], closing)

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
    def _take(self, sequence: Sequence, logits: Tensor) -> None:
        """Draw the sequence's next token; the sequence leaves if that was its last."""
        logprobs = scale(logits, sequence.sampling.temperature)
        token = draw(logprobs, sequence.sampling, sequence.generator)
        sequence.tokens.append(token)
        sequence.logprobs.append(float(logprobs[token]))
        sequence.versions.append(self._version)
        matched = token if token in sequence.stop_ids else self._stop_string(sequence)
        if matched is not None:
            self._finish(sequence, "stop", matched)
        elif len(sequence.tokens) >= sequence.sampling.max_tokens:
            self._finish(sequence, "length")

    def _stop_string(self, sequence: Sequence) -> str | None:
        """The stop string that the newest token completed, if any."""
        if not sequence.sampling.stop:
            return None
        # Each token is at least one byte, so this many tokens hold the longest stop string.
        tail = _STOP_MARGIN_TOKENS + max(len(text.encode()) for text in sequence.sampling.stop)
        text = self._tokenizer.decode(sequence.tokens[-tail:])
        return next((stop for stop in sequence.sampling.stop if stop in text), None)

    def _finish(self, sequence: Sequence, finish: Finish, matched: int | str | None = None) -> None:
        experts = None
        if sequence.experts_from is not None and sequence.running:
            experts = self._cache.experts(sequence.slot)[sequence.experts_from :]
        done = Completion(
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            token_versions=sequence.versions,
            weight_version=self._version,
            finish=finish,
            matched_stop=matched,
            cached_tokens=sequence.cached,
            experts=experts,
            latency_s=time.monotonic() - sequence.submitted,
        )
        self._leave(sequence, done)

    def _leave(self, sequence: Sequence, outcome: Completion | Exception | None) -> None:
        if sequence.running:
            self._running.remove(sequence)
            self._cache.release(sequence.slot)
        _resolve(sequence.future, outcome)

    def _update(self) -> None:
        """Make the changes of the weights that have come in."""
        while not self._updates.empty():
            change, future = self._updates.get()
            try:
                version = change.version or next_version(self._version)
                aborted = self._abort() if change.abort_all else 0
                perturb(self._model, change.seed, change.scale)
                self._cache.forget()
                self._version = version
                _resolve(future, Updated(version, aborted))
            except Exception as error:
                _resolve(future, error)

    def _abort(self) -> int:
        """End whatever runs or waits; returns how many generations that were."""
        ended = [each for each in [*self._running, *self._drain()] if not each.future.cancelled()]
        for sequence in ended:
            self._finish(sequence, "abort")
        return len(ended)

    def _drain(self) -> list[Sequence]:
        """All waiting requests, which wait no longer."""
        waiting = []
        while not self._waiting.empty():
            if (sequence := self._waiting.get()) is not None:
                waiting.append(sequence)
        return waiting


def _resolve(future: Future[_Outcome], outcome: _Outcome | Exception | None) -> None:
    # It may be cancelled at this very moment: then nobody waits for the outcome.
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)
