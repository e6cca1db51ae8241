"""The tokens between an assistant's turn and what follows it, for one tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tokentape_core.text.errors import TokenizerError
from tokentape_core.text.families import Family
from tokentape_core.text.tokenizer import Tokenizer


class Boundary:
    """The boundary tokens of a family (see `Family`), found in rendered text and in recorded ids."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        """Raises `TokenizerError` if the vocabulary lacks the family's first boundary token."""
        eos = (tokenizer.eos_token,) if tokenizer.eos_token else ()
        spellings = family.end_tokens or family.openers or eos
        if not spellings:
            raise TokenizerError(f"family {family.name} needs a tokenizer with an end-of-sequence token")
        ids = {spelling: tokenizer.token_id(spelling) for spelling in spellings}
        if ids[spellings[0]] is None:
            raise TokenizerError(
                f"turns of family {family.name} end with {spellings[0]}, which this tokenizer does not know: "
                "choose another family"
            )
        known = {spelling: token_id for spelling, token_id in ids.items() if token_id is not None}
        self._pattern = re.compile("|".join(map(re.escape, known)))
        self.tokens: Mapping[str, int] = MappingProxyType(known)
        self._ids = frozenset(known.values())
        self._replaced = frozenset(known[name] for name in family.replaced if name in known)
        self._opener = spellings[0] if family.openers else None
        self.names = " or ".join(known)

    def find(self, text: str, start: int = 0) -> int | None:
        """Where the first boundary token at or after `start` begins in `text`."""
        match = self._pattern.search(text, start)
        return match.start() if match else None

    def sampled(self, rendered: str) -> str:
        """What a model samples of a turn whose rendering goes on with `rendered`: up to its stop token."""
        if self._opener is not None:
            return rendered + self._opener
        ends = [match.end() for match in self._pattern.finditer(rendered)]
        return rendered[: ends[-1]] if ends else rendered

    def is_boundary(self, token_id: int) -> bool:
        """Whether that token ends a turn."""
        return token_id in self._ids

    def is_spelled(self, text: str) -> bool:
        """Whether `text` is the spelling of a boundary token."""
        return self._pattern.fullmatch(text) is not None

    def at_start(self, ids: npt.NDArray[np.int32]) -> bool:
        """Whether `ids` begin with a boundary token."""
        return ids.size > 0 and int(ids[0]) in self._ids

    def join(
        self, parent: npt.NDArray[np.integer], following: npt.NDArray[np.int32]
    ) -> tuple[int, npt.NDArray[np.int32]]:
        """How many tokens of `parent` to keep and what to put after them, so that one boundary token is left.

        `following` begins with a boundary token. If `parent` ends with one as well, an end token is taken
        from the former's start, an opener or a token that is replaced from the latter's end.
        """
        if parent.size == 0 or int(parent[-1]) not in self._ids:
            return parent.size, following
        if self._opener is not None or int(parent[-1]) in self._replaced:
            return parent.size - 1, following
        return parent.size, following[1:]
