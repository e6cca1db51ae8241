"""The key-value cache: a fixed number of slots, each of which holds one sequence.

A slot keeps its sequence after the request has ended. The next request that begins with the same tokens
copies that part instead of computing it again, which is what `cached_tokens` counts. With the keys and values
of a token it keeps the experts that the model's routers chose for it.

Shapes: `S` slots, `H` key-value heads, `C` context length, `D` head size, `B` sequences in a step, `T` new
tokens of each, `N` the longest sequence in a step, `L` layers with experts, `K` experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokentape_engine.model import Network
from tokentape_engine.routing import routing_shape, watch_routers


class SlotCache:
    """Keys and values of up to `slots` sequences, and the model's forward pass over them.

    Not safe for concurrent use: one thread owns it.
    """

    def __init__(self, model: Network, slots: int, context_length: int) -> None:
        config = model.config
        shape = (slots, config.num_key_value_heads or 1, context_length, config.head_dim)
        self._model = model
        self._keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self._values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self._experts = torch.zeros((slots, context_length, *routing_shape(model)), dtype=torch.int32)
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._outdated: set[int] = set()  # slots whose tokens no other request may begin with
        self._idle = list(range(slots))  # least recently used first

    @property
    def idle(self) -> int:
        """How many slots are free."""
        return len(self._idle)

    def acquire(self, prompt: list[int]) -> tuple[int, int]:
        """Take a slot for `prompt`; returns the slot and how many of the prompt's first tokens it holds.

        The last prompt token is always computed, because its logits are needed. Raises `IndexError` when no
        slot is idle.
        """
        slot = self._idle.pop(0)
        shared, source = max((self._shared(n, prompt), n) for n in range(len(self._tokens)))
        shared = min(shared, len(prompt) - 1)
        if source != slot:
            for stored in (*self._keys, *self._values):
                stored[slot, :, :shared] = stored[source, :, :shared]
            self._experts[slot, :shared] = self._experts[source, :shared]
        self._tokens[slot] = prompt[:shared]
        self._outdated.discard(slot)
        return slot, shared

    def release(self, slot: int) -> None:
        """Give the slot back; what it holds stays usable as a prefix until the slot is taken again."""
        self._idle.append(slot)

    def forget(self) -> None:
        """Share nothing of what is stored now: the weights that it was computed with are gone.

        Sequences in taken slots go on from what they have; they will not be shared either.
        """
        self._outdated.update(range(len(self._tokens)))

    def experts(self, slot: int) -> Tensor:
        """The experts chosen for each token that the slot has read, in the routers' order: int32[T, L, K]."""
        return self._experts[slot, : len(self._tokens[slot])].clone()

    @torch.inference_mode()
    def extend(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        """Append `T` tokens to each of the `B` slots; returns the logits after the last: float32[B, vocab].

        All rows of `tokens` have the same length.
        """
        ids = torch.tensor(tokens)
        starts = torch.tensor([len(self._tokens[slot]) for slot in slots])
        positions = starts[:, None] + torch.arange(ids.shape[1])
        longest = int(positions[:, -1].max()) + 1
        # A token sees the positions up to its own. That also hides what an earlier sequence left behind in a
        # slot.
        visible = torch.arange(longest) <= positions[:, None, :, None]
        view = _StepView(self._keys, self._values, torch.tensor(slots), positions, longest)
        with watch_routers(self._model) as chosen:
            # By position, because transformers renamed the cache's argument within version 5.
            hidden = self._model.model(ids, visible, positions, view, use_cache=True).last_hidden_state
        if chosen:
            rows = torch.stack(chosen, dim=1).view(*ids.shape, *self._experts.shape[2:])
            self._experts[torch.tensor(slots)[:, None], positions] = rows.int()
        for slot, row in zip(slots, tokens, strict=True):
            self._tokens[slot] += row
        logits: Tensor = self._model.lm_head(hidden[:, -1])
        return logits.float()

    def _shared(self, slot: int, prompt: list[int]) -> int:
        return 0 if slot in self._outdated else _common_prefix(self._tokens[slot], prompt)


class _StepView:
    """What the attention layers see as their cache during one forward pass."""

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], slots: Tensor, positions: Tensor, longest: int
    ) -> None:
        self._keys = keys
        self._values = values
        self._slots = slots
        self._rows = slots[:, None]
        self._positions = positions
        self._longest = longest

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new [B, H, T, D] and return all that the step attends to: [B, H, N, D] each."""
        return self._store(self._keys[layer], keys), self._store(self._values[layer], values)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        stored[self._rows, :, self._positions] = new.transpose(1, 2)
        return stored[:, :, : self._longest].index_select(0, self._slots)


def _common_prefix(left: list[int], right: list[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
