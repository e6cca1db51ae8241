"""Patterns that find one of many words fast."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
    shared = _common_start(words)
    words = [word[len(shared) :] for word in words]
    optional = "?" if "" in words else ""
    inner = any_of(words)
    return re.escape(shared) + (f"(?:{inner}){optional}" if inner else "")


def _common_start(words: Sequence[str]) -> str:
    low, high = min(words), max(words)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:same]
