"""From settings to a renderer: all that decides which ids a conversation has, as every process is told it."""

from __future__ import annotations

from dataclasses import replace

from tokentape_core.text.errors import RenderError, TokenizerError
from tokentape_core.text.families import Family, get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.settings import TextSettings
from tokentape_core.text.tokenizer import Tokenizer

__all__ = ["load_renderer", "load_tokenizer", "renderer_of"]


def load_renderer(settings: TextSettings) -> ChatRenderer:
    """Loads the tokenizer and its chat template. Takes seconds.

    Raises `TokenizerError`, which says what to do.
    """
    return renderer_of(load_tokenizer(settings), settings)


def load_tokenizer(settings: TextSettings) -> Tokenizer:
    """Loads the tokenizer, which need not have a chat template. Takes seconds. Raises `TokenizerError`."""
    return Tokenizer.load(settings.tokenizer, chat_template=settings.chat_template)


def renderer_of(tokenizer: Tokenizer, settings: TextSettings) -> ChatRenderer:
    """The renderer of a loaded tokenizer. Raises `TokenizerError`."""
    try:
        return ChatRenderer(
            tokenizer,
            _family(settings),
            settings.chat_template_kwargs,
            tools_form=settings.tools_form,
            special_tokens_in_text=settings.special_tokens_in_text,
        )
    except RenderError as error:
        raise TokenizerError(str(error)) from error


def _family(settings: TextSettings) -> Family:
    family = get_family(settings.family)
    return replace(family, end_tokens=settings.end_tokens) if settings.end_tokens else family
