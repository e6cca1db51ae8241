"""Training: fits the reference model to the dialogues, from random weights, in seconds on one core."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from tokentape_engine.dialogues import TOOLS, dialogues
from tokentape_engine.model import TinyModel
from tokentape_engine.options import TRAIN_STEPS

_BATCH = 4
_LEARNING_RATE = 0.015
_WARM_UP_STEPS = 10
_SHARE_WITHOUT_TOOLS = 0.67
_IGNORED = -100
"""Label of a position without loss."""


def train(model: TinyModel, steps: int = TRAIN_STEPS, seed: int = 0) -> None:
    """Fit `model` to all dialogues, in place; `seed` orders them. 0 steps leave it as it is.

    The first steps leave the tools out of the system prompt, where they are two thirds of the tokens:
    attention that starts out even finds the word to copy sooner among few tokens, and the steps are cheaper.
    Reports progress on stderr about once a second. The loss is in nats per assistant token.
    """
    network = model.network.train()
    short, full = _batches(model, None, seed), _batches(model, TOOLS, seed)
    without_tools = int(steps * _SHARE_WITHOUT_TOOLS)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    started = reported = time.monotonic()
    for step in range(steps):
        batch_loss = _loss(model, *next(short if step < without_tools else full))
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 - step / steps)
        optimizer.zero_grad()
        batch_loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        now = time.monotonic()
        if now - reported >= 0.8 or step == steps - 1:
            reported = now
            progress = (
                f"training: step {step + 1}/{steps}, loss {batch_loss.item():.3f}, {now - started:.0f} s"
            )
            print(progress, file=sys.stderr, flush=True)
    network.train(False)


def loss(model: TinyModel, batches: int = 2) -> float:
    """The mean loss over some dialogues with their tools, in nats per assistant token."""
    losses = [_loss(model, *batch).item() for batch in islice(_batches(model, TOOLS, seed=1), batches)]
    return sum(losses) / batches


def _batches(model: TinyModel, tools: list[Any] | None, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: what all dialogues begin with, int64[1, P], and the rest of some, int64[2, B, T].

    The rest is ids and labels, padded on the right. Every dialogue comes once in each round.
    """
    prefix, rows = _examples(model, tools)
    shuffle = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < _BATCH:
            order += torch.randperm(len(rows), generator=shuffle).tolist()
        picked, order = [rows[index] for index in order[:_BATCH]], order[_BATCH:]
        ids = pad_sequence([row[0] for row in picked], batch_first=True)
        labels = pad_sequence([row[1] for row in picked], batch_first=True, padding_value=_IGNORED)
        yield prefix, torch.stack([ids, labels])


def _examples(model: TinyModel, tools: list[Any] | None) -> tuple[Tensor, list[Tensor]]:
    """The common prefix int64[1, P], and ids and labels of each dialogue's rest, int64[2, T]."""
    rows = []
    for dialogue in dialogues():
        rendered: Any = model.tokenizer.apply_chat_template(
            dialogue, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(rendered["input_ids"])
        labels = ids.where(torch.tensor(rendered["assistant_masks"]) == 1, _IGNORED)
        rows.append(torch.stack([ids, labels]))
    shortest = min(row.shape[1] for row in rows)
    heads = torch.stack([row[0, :shortest] for row in rows])
    common = int((heads == heads[0]).all(dim=0).long().cumprod(dim=0).sum())
    return heads[:1, :common], [row[:, common:] for row in rows]


def _loss(model: TinyModel, prefix: Tensor, batch: Tensor) -> Tensor:
    ids, labels = batch
    network = model.network
    # The prefix is computed once and repeated, not once per row.
    cache = DynamicCache(config=network.config)
    # By position, because transformers renamed the cache's argument within version 5.
    network.model(prefix, None, None, cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    hidden = network.model(ids, None, None, cache, use_cache=True).last_hidden_state
    learned = labels[:, 1:] != _IGNORED
    # Logits are the largest tensor by far: only where there is a loss.
    logits = network.lm_head(hidden[:, :-1][learned])
    return functional.cross_entropy(logits, labels[:, 1:][learned])
