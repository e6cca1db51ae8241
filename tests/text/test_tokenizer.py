"""Text to ids and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors
from transformers import PreTrainedTokenizerFast

from tokentape_core.text.errors import TokenizerError
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

BYTES = st.integers(0, 255)  # the first ids are the single bytes
ANY_ID = st.integers(0, 152_000)  # some above the vocabulary, as a padded embedding can sample them
SPECIAL_ID = st.integers(151_643, 151_668)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.one_of(BYTES, ANY_ID, SPECIAL_ID), max_size=60))
def test_decode_equals_transformers(
    qwen3: Tokenizer, full_hf: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    """Any ids decode to what transformers says: special tokens, cut UTF-8 and unknown ids included."""
    want = full_hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    assert qwen3.decode(ids) == want
    assert qwen3.decode(np.array(ids, dtype=np.int32)) == want


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(BYTES, max_size=12))
def test_bytes_that_are_not_utf8_decode_as_in_transformers(
    qwen3: Tokenizer, full_hf: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    """Arbitrary bytes give the same replacement characters, in number and place."""
    assert qwen3.decode(ids) == full_hf.decode(ids, clean_up_tokenization_spaces=False)


@given(text=st.text(max_size=200))
def test_encode_equals_transformers(full_hf: PreTrainedTokenizerFast, qwen3: Tokenizer, text: str) -> None:
    """Any text encodes to the ids that transformers gives without added special tokens."""
    assert qwen3.encode(text) == full_hf.encode(text, add_special_tokens=False)


def test_a_decoder_that_is_not_byte_level_is_left_to_the_library() -> None:
    """A tokenizer that decodes in another way gets its own way, whatever its vocabulary looks like."""
    hf = _changed(lambda backend: setattr(backend, "decoder", decoders.WordPiece(prefix="##", cleanup=False)))
    ids = [39, 40, 41]

    assert Tokenizer(hf).decode(ids) == hf.decode(ids) == "H I J"


def test_encode_adds_nothing_and_reads_special_tokens() -> None:
    """No special token is put around the text; one that is spelled in it becomes its id."""
    begin = ("<|endoftext|>", small_tokenizer().convert_tokens_to_ids("<|endoftext|>"))
    post = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[begin])
    tokenizer = Tokenizer(_changed(lambda backend: setattr(backend, "post_processor", post)))

    ids = tokenizer.encode("a<|im_end|>")

    assert ids == [*tokenizer.encode("a"), tokenizer.token_id("<|im_end|>")]
    assert len(ids) == 2


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    """A tokenizer.json that truncates and pads, left over from a training run, cuts and adds nothing."""

    def leave_over(backend: Backend) -> None:
        backend.enable_truncation(max_length=4)
        backend.enable_padding(length=64)

    assert Tokenizer(_changed(leave_over)).encode("a b c d e f") == Tokenizer(small_tokenizer()).encode(
        "a b c d e f"
    )


def test_text_that_is_not_unicode_is_refused(qwen3: Tokenizer) -> None:
    """A lone surrogate is a ValueError that says so."""
    with pytest.raises(ValueError, match="lone surrogate"):
        qwen3.encode("a\ud800b")


def test_a_negative_id_is_refused(qwen3: Tokenizer) -> None:
    """No id wraps around to the end of the vocabulary."""
    with pytest.raises(ValueError, match="negative: -1"):
        qwen3.decode([5, -1])


def test_the_size_counts_every_id(qwen3: Tokenizer) -> None:
    """The greatest id of vocabulary and added tokens, plus 1."""
    more = small_tokenizer()
    more.add_tokens(["<|more|>"])

    assert qwen3.size == 151_669
    assert Tokenizer(more).size == Tokenizer(small_tokenizer()).size + 1
    assert Tokenizer(more).token_id("<|more|>") == Tokenizer(more).size - 1


def test_load_from_a_directory(tmp_path: Path) -> None:
    """A saved tokenizer loads without a network and has the same fingerprint every time."""
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3")
    hf.save_pretrained(tmp_path)

    first, second = Tokenizer.load(str(tmp_path)), Tokenizer.load(str(tmp_path))

    assert first.encode("Hello<|im_end|>") == hf.encode("Hello<|im_end|>")
    assert first.fingerprint == second.fingerprint
    assert len(first.fingerprint) == 16


def test_a_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    """`chat_template` is what renders, and it changes the fingerprint."""
    small_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "other.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")

    plain, other = Tokenizer.load(str(tmp_path)), Tokenizer.load(str(tmp_path), chat_template=path)

    assert not plain.has_template
    assert other.apply_template([{"role": "user", "content": "hi"}], template_kwargs={}) == "hi|"
    assert plain.fingerprint != other.fingerprint


def test_a_changed_vocabulary_changes_the_fingerprint() -> None:
    """One more token is another tokenizer."""
    more = small_tokenizer()
    more.add_tokens(["<|more|>"])

    assert Tokenizer(more).fingerprint != Tokenizer(small_tokenizer()).fingerprint


def test_load_errors_say_what_to_do(tmp_path: Path) -> None:
    """A missing directory, one without a tokenizer, and a missing template file are named."""
    with pytest.raises(TokenizerError, match=r"no tokenizer at /nowhere/model: there is no such directory"):
        Tokenizer.load("/nowhere/model")
    with pytest.raises(TokenizerError, match=r"Give a directory that holds tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    small_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match=r"cannot read the chat template .*missing\.jinja"):
        Tokenizer.load(str(tmp_path), chat_template=tmp_path / "missing.jinja")


def _changed(change: Callable[[Backend], None]) -> PreTrainedTokenizerFast:
    hf = small_tokenizer()
    change(hf.backend_tokenizer)
    return hf
