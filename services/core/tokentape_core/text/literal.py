"""Spellings of special tokens in what others wrote, encoded as the ordinary text that they are.

A chat template writes control tokens and messages into one text, in which nobody can tell a control token
from a message that spells one. So a mark is put into the spellings before, and taken out after: what holds
one is tokenised with special tokens switched off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tokentape_core.text.errors import RenderError, TokenizerError
from tokentape_core.text.patterns import any_of
from tokentape_core.text.tokenizer import Tokenizer

__all__ = ["LiteralEncoder"]

_MARKS: Final = tuple(map(chr, range(0xE000, 0xE040)))
"""Private-use characters: one that no message holds is the mark."""


class LiteralEncoder:
    """Marks spellings of special tokens and encodes marked text. Immutable; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes seconds, as it copies the vocabulary.

        Raises `TokenizerError` if a special token is one character long: there is no place for a mark in it.
        """
        tokens = tokenizer.special_tokens()
        if short := sorted(token for token in tokens if len(token) < 2):
            raise TokenizerError(
                f"the special token {short[0]!r} cannot be told from the same text in a message"
            )
        self._tokenizer = tokenizer
        self._ids = tokens
        self._spelling = re.compile(any_of(tokens)) if tokens else None
        self._between = re.compile(
            "|".join(map(_with_spaces, _longest_first(tokenizer.added_tokens().values())))
        )
        backend = tokenizer.copy_of_backend()
        self._at_start = _without_special_tokens(backend)
        self._inside = _without_special_tokens(_never_first(backend))

    def mark_for(self, *written: object) -> str:
        """A character that marks the spellings in these values, however deep; "" if they hold none.

        Raises `RenderError` if they hold every character that could.
        """
        texts = [text for value in written for text in _texts(value)]
        if self._spelling is None or not any(map(self._spelling.search, texts)):
            return ""
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise RenderError("the messages spell a special token and hold every character that could mark it")

    def marked(self, value: Any, mark: str) -> Any:
        """A copy of a JSON value in which no text, and no key, spells a special token any more."""
        if isinstance(value, str):
            return self._marked_text(value, mark)
        if isinstance(value, Mapping):
            return {self.marked(key, mark): self.marked(inner, mark) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(inner, mark) for inner in value]
        return value

    def encode(self, text: str, mark: str) -> list[int]:
        """The ids of a marked text, as if it had no marks and its marked spellings were no special tokens.

        Raises `RenderError` if the vocabulary makes such a token of them all the same, or other text, and
        `ValueError` as `Tokenizer.encode` does.
        """
        ids: list[int] = []
        done = 0
        for start, end in self._spans(text):
            if mark in text[start:end]:
                ids += self._tokenizer.encode(text[done:start]) if done < start else []
                ids += self._literal(text[start:end].replace(mark, ""), is_first=start == 0)
                done = end
        return ids + (self._tokenizer.encode(text[done:]) if done < len(text) else [])

    def _marked_text(self, text: str, mark: str) -> str:
        if self._spelling is None:
            return text
        # More than once: where two spellings overlap, breaking the one may leave the other.
        while self._spelling.search(text):
            text = self._spelling.sub(lambda spelling: spelling[0][0] + mark + spelling[0][1:], text)
        return text

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the texts between special tokens are; these are tokenised independently of each other."""
        start = 0
        for token in self._between.finditer(text):
            yield start, token.start()
            start = token.end()
        yield start, len(text)

    def _literal(self, text: str, *, is_first: bool) -> list[int]:
        backend = self._at_start if is_first else self._inside
        try:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise ValueError("the text is not valid Unicode: it holds a lone surrogate") from error
        ids = list(encoding.ids)
        if self._tokenizer.is_byte_level and self._tokenizer.decode(ids) != self._normalized(text):
            raise RenderError("the text of a message that spells a special token does not survive tokenising")
        found = set(ids)
        for spelling, token_id in self._ids.items():
            if token_id in found and spelling in text:
                raise RenderError(
                    f"this vocabulary has no other way to write {spelling} than the token itself"
                )
        return ids

    def _normalized(self, text: str) -> str:
        normalizer = self._at_start.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _texts(value: object) -> Iterator[str]:
    """All texts and keys in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _longest_first(tokens: Iterable[AddedToken]) -> list[AddedToken]:
    special = [token for token in tokens if token.special]
    return sorted(special, key=lambda token: -len(token.content))


def _with_spaces(token: AddedToken) -> str:
    """A pattern for the token and the spaces that it swallows."""
    before, after = (r"\s*" if swallows else "" for swallows in (token.lstrip, token.rstrip))
    return before + re.escape(token.content) + after


def _without_special_tokens(backend: Backend) -> Backend:
    backend.encode_special_tokens = True
    return backend


def _never_first(backend: Backend) -> Backend:
    """A copy that does not take the start of what it gets for the start of a text."""
    state = json.loads(backend.to_str())
    _unset_first(state["pre_tokenizer"])
    return Backend.from_str(json.dumps(state))


def _unset_first(pre_tokenizer: dict[str, Any] | None) -> None:
    if pre_tokenizer is None:
        return
    if pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
    for part in pre_tokenizer.get("pretokenizers", ()):
        _unset_first(part)
