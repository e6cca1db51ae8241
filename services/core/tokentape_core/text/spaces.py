"""Decoders of SentencePiece vocabularies, less their habit to strip the space at the start of every text.

Such a vocabulary writes a space before a word into the word's token, and one before the first word of a text
too; its decoder takes that one away again. It cannot know that the ids which it is given are the middle of a
text, where the space is real.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers.decoders import Decoder, Sequence

__all__ = ["keeping_spaces"]


def keeping_spaces(decoder: Decoder | None) -> Decoder | None:
    """A decoder with which the texts of pieces, put together, are the text of the whole, cut UTF-8 aside.

    None for a decoder that strips nothing, or that is none of these two: `Metaspace`, or a sequence that
    strips what it has fused before.
    """
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    kept = _keeping(state)
    if kept == state:
        return None
    # Any decoder takes the state of any other; the library has no function that reads one.
    changed = Sequence([])
    changed.__setstate__(json.dumps(kept).encode())
    return changed


def _keeping(state: dict[str, Any]) -> dict[str, Any]:
    if state["type"] == "Metaspace":
        return {**state, "prepend_scheme": "never"}
    if state["type"] != "Sequence":
        return state
    parts: list[dict[str, Any]] = []
    for part in state["decoders"]:
        is_fused = any(before["type"] == "Fuse" for before in parts)
        if not (is_fused and part["type"] == "Strip"):
            parts.append(_keeping(part))
    return {**state, "decoders": parts}
