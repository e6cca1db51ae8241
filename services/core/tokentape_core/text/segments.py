"""A conversation cut at its special tokens, from recorded ids or from rendered text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from tokentape_core.text.boundary import Boundary
from tokentape_core.text.patterns import any_of
from tokentape_core.text.tokenizer import Tokenizer

__all__ = ["Segments", "Splitter"]


@dataclass(frozen=True, slots=True)
class Segments:
    """`texts[0] specials[0] texts[1] … specials[-1] texts[-1]`; a text may be empty."""

    specials: list[str]
    texts: list[str]

    @property
    def text(self) -> str:
        """All of it."""
        return self.join(0, len(self.specials))

    def join(self, start: int, end: int) -> str:
        """Texts `start` to `end` and the special tokens between them."""
        pairs = zip(self.texts[start:end], self.specials[start:end], strict=True)
        return "".join(chain(chain.from_iterable(pairs), [self.texts[end]]))


class Splitter:
    """Cuts at the special tokens of one tokenizer. Immutable and safe to share between threads.

    Only those count that the tokenizer itself calls special, and those that end a turn. Tags such as Qwen3's
    <think> are text, though each is one token.
    """

    def __init__(self, tokenizer: Tokenizer, boundary: Boundary) -> None:
        spellings = {**tokenizer.special_tokens(), **boundary.tokens}
        self._tokenizer = tokenizer
        self._names = {token_id: spelling for spelling, token_id in spellings.items()}
        self._is_special = np.zeros(max(self._names, default=-1) + 2, dtype=bool)
        self._is_special[list(self._names)] = True
        self._pattern = re.compile(f"({any_of(spellings)})") if spellings else None

    def of_ids(self, ids: npt.NDArray[np.integer]) -> tuple[Segments, npt.NDArray[np.intp]]:
        """The segments of `ids` (shape [T]), and the positions of the special tokens in them."""
        # The row after the last id is never special; ids above the vocabulary are read from it.
        positions = np.flatnonzero(self._is_special.take(ids, mode="clip"))
        specials = [self._names[token_id] for token_id in ids[positions].tolist()]
        return Segments(specials, self._tokenizer.decode_between(ids, positions.tolist())), positions

    def count_in_ids(self, ids: npt.NDArray[np.integer]) -> int:
        """How many special tokens there are in `ids` (shape [T])."""
        return int(np.count_nonzero(self._is_special.take(ids, mode="clip")))

    def of_text(self, text: str, mark: str = "") -> Segments:
        """The segments that tokenising `text` would give, without doing so: for byte-level vocabularies.

        `mark` is taken out of them; a special token that it breaks is text (`LiteralEncoder`).
        """
        parts = self._pattern.split(text) if self._pattern else [text]
        texts = [text.replace(mark, "") for text in parts[::2]] if mark else parts[::2]
        return Segments(parts[1::2], texts)
