"""Text and tokens: tokenizers, chat templates, and the prompts that extend recorded tokens."""

from __future__ import annotations

from tokentape_core.text.errors import (
    NotAppendable,
    RenderError,
    TextError,
    TokenizerError,
    UnknownFamilyError,
)
from tokentape_core.text.families import FAMILIES, Family, get_family
from tokentape_core.text.render import ChatRenderer, Prompt
from tokentape_core.text.tokenizer import Tokenizer

__all__ = [
    "FAMILIES",
    "ChatRenderer",
    "Family",
    "NotAppendable",
    "Prompt",
    "RenderError",
    "TextError",
    "Tokenizer",
    "TokenizerError",
    "UnknownFamilyError",
    "get_family",
]
