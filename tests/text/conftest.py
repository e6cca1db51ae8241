"""Real tokenizers and real chat templates, built once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, full_qwen3_tokenizer, small_tokenizer


@pytest.fixture(scope="session")
def full_hf() -> PreTrainedTokenizerFast:
    """transformers' own tokenizer with the full Qwen3 vocabulary, as the yardstick."""
    return full_qwen3_tokenizer()


@pytest.fixture(scope="session")
def qwen3() -> Tokenizer:
    """The full Qwen3 vocabulary with the append-only template."""
    tokenizer = full_qwen3_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    return Tokenizer(tokenizer)


@pytest.fixture(scope="session")
def renderer(qwen3: Tokenizer) -> ChatRenderer:
    """Qwen3's renderer with real ids."""
    return ChatRenderer(qwen3, get_family("qwen3"))


@pytest.fixture
def with_template() -> Callable[..., ChatRenderer]:
    """Makes a qwen3 renderer from the source of a template, with keywords as its template arguments."""

    def make(source: str, **template_kwargs: object) -> ChatRenderer:
        tokenizer = small_tokenizer()
        tokenizer.chat_template = source
        return ChatRenderer(Tokenizer(tokenizer), get_family("qwen3"), template_kwargs)

    return make
