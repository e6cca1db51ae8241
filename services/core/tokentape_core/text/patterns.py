"""Patterns that find one of many words fast."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokentape_core.texts import common_start

__all__ = ["any_of"]


def any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of `words`, grouped by what they begin with.

    Vocabularies have hundreds of special tokens that all begin alike: tried one by one at every `<` of a
    text, they would cost more than everything else.
    """
    rest: dict[str, list[str]] = {}
    for word in sorted(filter(None, set(words))):
        rest.setdefault(word[0], []).append(word[1:])
    return "|".join(re.escape(first) + _tail(tails) for first, tails in rest.items())


def _tail(words: Sequence[str]) -> str:
    low, high = min(words), max(words)
    shared = low[: common_start(low, high)]
    words = [word[len(shared) :] for word in words]
    optional = "?" if "" in words else ""
    inner = any_of(words)
    return re.escape(shared) + (f"(?:{inner}){optional}" if inner else "")
