"""Decode byte-level BPE by table: several times faster than the tokenizers library, with the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


class ByteTable:
    """The bytes of every token id of a byte-level vocabulary. Immutable; safe to share between threads."""

    __slots__ = ("_bytes",)

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        """`vocabulary`: each token, spelled in the byte-level alphabet, and its id; added tokens included."""
        size = max(vocabulary.values(), default=-1) + 1
        # One empty row more: ids above the vocabulary, which padded embeddings can sample, add nothing.
        table = np.full(size + 1, b"", dtype=object)
        for token, token_id in vocabulary.items():
            table[token_id] = _token_bytes(token)
        self._bytes = table

    def decode(self, ids: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """The text of `ids` (shape [T]). Bytes that are not UTF-8 become U+FFFD.

        Ids above the vocabulary add nothing. A negative id raises `ValueError`.
        """
        indices = np.asarray(ids, dtype=np.intp)
        if indices.size and indices.min() < 0:
            raise ValueError(f"a token id is negative: {int(indices.min())}")
        pieces: list[bytes] = self._bytes.take(indices, mode="clip").tolist()
        return b"".join(pieces).decode("utf-8", errors="replace")

    def decode_between(self, ids: npt.NDArray[np.integer], cuts: Sequence[int]) -> list[str]:
        """The texts before, between and after the tokens at the positions `cuts`, which ascend.

        One text more than cuts; each as `decode` gives it.
        """
        pieces: list[bytes] = self._bytes.take(ids, mode="clip").tolist()
        starts = [0, *(cut + 1 for cut in cuts)]
        ends = [*cuts, len(pieces)]
        joined = (b"".join(pieces[start:end]) for start, end in zip(starts, ends, strict=True))
        return [text.decode("utf-8", errors="replace") for text in joined]


def _alphabet() -> dict[str, int]:
    """The byte behind each character of GPT-2's alphabet.

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _alphabet()
_ALPHABET = frozenset(_BYTE_OF)
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _BYTE_OF.items()})


def _token_bytes(token: str) -> bytes:
    if _ALPHABET.issuperset(token):
        return token.translate(_TO_LATIN_1).encode("latin-1")
    # An added token is spelled as plain text. If all of it happens to fit the alphabet, it is read in the
    # alphabet all the same: that is what the library does.
    return token.encode("utf-8")
