"""The reference model: a Qwen3 of 0.35 M parameters, small enough to learn the dialogues in seconds.

It is rendered with trl's `qwen3_training` template. Unlike the published `qwen3` template that one is
append-only across tool calls *and* user turns: it renders every assistant message with its think block,
whatever follows it, so the rendering of a longer conversation always begins with that of the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tokentape_engine.dialogues import Message
from tokentape_engine.tokenizer import END_OF_TEXT, END_OF_TURN, chat_template, small_tokenizer

CHAT_TEMPLATE = "qwen3_training"
CONTEXT_LENGTH = 4096
"""Tokens of prompt and output together."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model with its tokenizer; the tokenizer carries the chat template."""

    network: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def create(cls, seed: int = 0) -> TinyModel:
        """A model with random weights. `seed` decides them."""
        tokenizer = small_tokenizer()
        tokenizer.chat_template = chat_template(CHAT_TEMPLATE)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_LENGTH,
            # With the usual 0.02 an untrained model hardly notices a wrong token in its prompt; tests want it
            # to.
            initializer_range=0.2,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = Qwen3ForCausalLM(config)
        network.train(False)
        return cls(network, tokenizer)

    @classmethod
    def load(cls, folder: Path) -> TinyModel:
        """The model that `save` wrote. Needs no network."""
        network = Qwen3ForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
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
