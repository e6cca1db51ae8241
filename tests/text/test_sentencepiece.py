"""Vocabularies whose tokens hold the space before a word: no space is lost or made up between pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.models import SENTENCEPIECE, sentencepiece
from tokentape_core.text.families import get_family
from tokentape_core.text.mismatch import find_mismatches
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Find the cat"}
ANSWER = {"role": "assistant", "content": "Yes the  cat sat"}


def _renderer(style: str) -> ChatRenderer:
    return ChatRenderer(Tokenizer(sentencepiece(style)), get_family("default"))


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " ", "  cat", "é", "sat\n", "</s>", " on"]), max_size=8),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
@pytest.mark.parametrize("style", SENTENCEPIECE)
def test_the_texts_of_pieces_are_the_text_of_the_whole(style: str, words: list[str], cuts: list[int]) -> None:
    """Wherever ids are cut between characters, the texts of the pieces add up to that of all of them."""
    tokenizer = Tokenizer(sentencepiece(style))
    # Each character of two bytes is two tokens, between which no piece can be cut.
    ids = tokenizer.encode("".join(words).replace("é", " Hello"))
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]

    pieces = [tokenizer.decode(ids[start:end]) for start, end in pairwise(places)]

    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("style", SENTENCEPIECE)
def test_a_word_keeps_its_space(style: str) -> None:
    """A token decodes to its word and the space before it, bytes to their character, ids above to nothing."""
    hf = sentencepiece(style)
    tokenizer = Tokenizer(hf)
    word = tokenizer.token_id("▁cat")
    assert word is not None

    assert tokenizer.decode([word]) == " cat"
    assert tokenizer.decode([word, 100_000, word]) == " cat cat"
    assert tokenizer.decode([]) == ""
    if style != "metaspace":
        assert tokenizer.decode(tokenizer.encode("é")).strip() == "é"
    # The library strips it, unless its decoder says otherwise; the tokenizer that we were given is as it was.
    assert hf.decode([word]) == (" cat" if style == "gemma" else "cat")
    with pytest.raises(ValueError, match="negative: -1"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("style", SENTENCEPIECE)
def test_cutting_at_special_tokens_keeps_spaces(style: str) -> None:
    """The texts between special tokens begin with the spaces that their tokens have."""
    tokenizer = Tokenizer(sentencepiece(style))
    word, end = tokenizer.token_id("▁cat"), tokenizer.token_id("</s>")

    assert tokenizer.decode_between(np.array([word, end, word]), [1]) == [" cat", " cat"]


@pytest.mark.parametrize("style", SENTENCEPIECE)
def test_a_recording_turn_by_turn_is_the_templates(style: str) -> None:
    """Each suffix is that of the whole conversation, and nothing is called a mismatch that is none."""
    renderer = _renderer(style)
    path: list[dict[str, Any]] = [USER]
    tokens = renderer.render(path)
    sampled = np.zeros(len(tokens), dtype=bool)
    for following in ([USER], []):
        output = renderer.sample(path, ANSWER)
        tokens = np.concatenate([tokens, output])
        sampled = np.concatenate([sampled, np.ones(len(output), dtype=bool)])
        path.append(ANSWER)
        assert find_mismatches(renderer, tokens, path, sampled=sampled) == []
        if following:
            prompt = renderer.extend(tokens, ANSWER, following)
            tokens = np.concatenate([tokens[: prompt.keep], prompt.suffix])
            sampled = np.concatenate([sampled[: prompt.keep], np.zeros(len(prompt.suffix), dtype=bool)])
            path += following
            np.testing.assert_array_equal(prompt.suffix, renderer.render(path)[-len(prompt.suffix) :])

    changed = [{"role": "user", "content": "Find it"}, *path[1:]]
    (found,) = find_mismatches(renderer, tokens, changed, sampled=sampled)
    assert (found["type"], "the cat" in found["actual_text"]) == ("non_assistant_text", True)
