"""The reference model: a Qwen3 small enough to learn the dialogues in seconds.

There are two kinds: a dense one of 0.35 M parameters, and a mixture of experts of 0.5 M (2 of 8 experts for
each token in each of 2 layers).

It is rendered with trl's `qwen3_training` template. Unlike the published `qwen3` template that one is
append-only across tool calls *and* user turns: it renders every assistant message with its think block,
whatever follows it, so the rendering of a longer conversation always begins with that of the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors.torch import load_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tokentape_engine.dialogues import Message
from tokentape_engine.options import Kind
from tokentape_engine.tokenizer import END_OF_TEXT, END_OF_TURN, chat_template, small_tokenizer

CHAT_TEMPLATE = "qwen3_training"
CONTEXT_LENGTH = 4096
"""Tokens of prompt and output together."""

TRAINED = Path(__file__).with_name("trained.safetensors")
"""The weights of `TinyModel.trained`."""

Network: TypeAlias = Qwen3ForCausalLM | Qwen3MoeForCausalLM


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model with its tokenizer; the tokenizer carries the chat template."""

    network: Network
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def create(cls, seed: int = 0, kind: Kind = "dense") -> TinyModel:
        """A model with random weights. `seed` decides them."""
        tokenizer = small_tokenizer()
        tokenizer.chat_template = chat_template(CHAT_TEMPLATE)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = _random_network(kind, tokenizer)
        network.train(False)
        return cls(network, tokenizer)

    @classmethod
    def trained(cls) -> TinyModel:
        """The dense model with the weights that `training` leads to from seed 0, which come with the package.

        `scripts/train-reference-model` makes them anew, which a change of the dialogues, the tokenizer, the
        template or the network calls for.
        """
        model = cls.create()
        load_model(model.network, TRAINED)
        return model

    @classmethod
    def load(cls, folder: Path) -> TinyModel:
        """The model that `save` wrote, of whichever kind. Needs no network."""
        network = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        if not isinstance(network, Network):
            raise TypeError(f"{folder} holds a {type(network).__name__}, not a Qwen3 or Qwen3-MoE")
        network.train(False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise TypeError(f"{folder} holds a {type(tokenizer).__name__}, not a fast tokenizer")
        return cls(network, tokenizer)

    def save(self, folder: Path) -> None:
        """Write weights, config, tokenizer and chat template, as transformers' Auto classes load them."""
        self.tokenizer.save_pretrained(folder)
        self.network.save_pretrained(folder)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """The ids of the conversation, up to where the next assistant message begins.

        Raises what the template raises; templates differ in what they refuse.
        """
        rendered: Any = self.tokenizer.apply_chat_template(
            messages,
            tools=cast(Any, tools),
            **template_kwargs | {"add_generation_prompt": True, "return_dict": True},
        )
        return list(rendered["input_ids"])

    @property
    def kind(self) -> Kind:
        """Whether the model has experts."""
        return "moe" if isinstance(self.network, Qwen3MoeForCausalLM) else "dense"

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an output: `<|im_end|>` and `<|endoftext|>`."""
        return frozenset({self._token_id(END_OF_TURN), self._token_id(END_OF_TEXT)})

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return int(self.network.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Ids are below this bound."""
        return int(self.network.config.vocab_size)

    def _token_id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if not isinstance(token_id, int):
            raise TypeError(f"{token!r} is not one token")
        return token_id


def _random_network(kind: Kind, tokenizer: PreTrainedTokenizerFast) -> Network:
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        # With the usual 0.02 an untrained model hardly notices a wrong token in its prompt; tests want it to.
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    # Two experts of half the width cost a token what the dense layer costs it.
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | experts))
