"""A model's tokenizer and chat template, read-only, for use from many threads."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from tokentape_core.text import clock, hub
from tokentape_core.text.bytelevel import ByteTable
from tokentape_core.text.errors import TokenizerError
from tokentape_core.text.sandbox import prepare
from tokentape_core.text.spaces import keeping_spaces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Tokenizer", "TokenizerError"]


class Tokenizer:
    """Text to ids and back, and messages to text.

    Immutable and safe to share between threads. While it encodes a long text, other threads run; decoding and
    applying a template hold the interpreter lock.
    """

    __slots__ = (
        "_backend",
        "_decoder",
        "_fingerprint",
        "_hf",
        "_reserved_kwargs",
        "_size",
        "_table",
        "_tokens",
    )

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Take over `tokenizer`, which nobody may change, or pad or truncate with, from now on."""
        self._hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Some tokenizer files carry the truncation of a training run: it would cut prompts silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self._size = max(vocabulary.values(), default=-1) + 1
        self._table = self._byte_table(vocabulary)
        self._decoder = keeping_spaces(self._backend.decoder)
        self._tokens = _by_id(vocabulary, self._size)
        self._fingerprint = self._digest(vocabulary)
        self._reserved_kwargs = _reserved_kwargs(tokenizer)

    @classmethod
    def load(cls, name_or_dir: str, *, chat_template: Path | None = None) -> Tokenizer:
        """Load a tokenizer from a directory, or by model name from the hub or its local cache.

        A directory needs no network. `chat_template` is a Jinja file that replaces the model's own template.
        Code that comes with a model is never run. Takes seconds, also if the hub does not answer. Raises
        `TokenizerError`, which says what to do.
        """
        # Importing transformers takes seconds, and not everyone who imports this module loads a tokenizer.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        source = hub.locate(name_or_dir)
        try:
            loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # whatever the loader's parsers, cache and network raise
            raise hub.cannot_load(name_or_dir, " ".join(str(error).split()).rstrip(".")) from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise TokenizerError(
                f"the tokenizer of {name_or_dir} ({type(loaded).__name__}) has no tokenizer.json form: "
                "convert it first"
            )
        if chat_template is not None:
            try:
                loaded.chat_template = chat_template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"cannot read the chat template {chat_template}: {error}") from error
        return cls(loaded)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change if the vocabulary, the merges, the special tokens or the template do."""
        return self._fingerprint

    @property
    def is_byte_level(self) -> bool:
        """Whether a text that is encoded and decoded is itself again, but for Unicode normalisation.

        Other vocabularies may write a space before its first word, and words that they do not know as one.
        """
        return self._table is not None

    @property
    def size(self) -> int:
        """The greatest id that has a text, plus 1. Padded embeddings can sample ids from there on."""
        return self._size

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template to render messages with."""
        return bool(self._hf.chat_template)

    @property
    def templates(self) -> tuple[str, ...]:
        """The source of every chat template there is: mostly one."""
        found = self._hf.chat_template or {}
        return (found,) if isinstance(found, str) else tuple(found.values())

    @property
    def eos_token(self) -> str | None:
        """The spelling of the token that ends a generation, if the tokenizer names one."""
        token = self._hf.eos_token
        return None if token is None else str(token)

    @property
    def reserved_kwargs(self) -> frozenset[str]:
        """The names that are not free for `template_kwargs`."""
        return self._reserved_kwargs

    def token_id(self, token: str) -> int | None:
        """The id of one token by its spelling, or None if the vocabulary has no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without the special tokens that a tokenizer may add around it.

        The spelling of a special token becomes that token wherever it stands. Chat templates rely on it;
        hence a message that spells one yields it too, as in every engine that applies the template itself.
        Raises `ValueError` if `text` holds a lone surrogate, which no valid Unicode text does.
        """
        try:
            # The batch form releases the interpreter lock; `encode` holds it, 0.5 s for 160k tokens.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise ValueError("the text is not valid Unicode: it holds a lone surrogate") from error
        return list(encoding.ids)

    def decode(self, ids: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """The text of `ids` (shape [T]), special tokens included and spaces as they are.

        Equal to transformers' `decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)`:
        cut UTF-8 becomes U+FFFD, ids above the vocabulary add nothing. But where that strips a space at the
        start, as for SentencePiece vocabularies, it stays: the texts of pieces, put together, are the text of
        the whole. Raises `ValueError` on a negative id.
        """
        if self._table is not None:
            return self._table.decode(ids)
        values = np.asarray(ids, dtype=np.int64)
        if values.size and values.min() < 0:
            raise ValueError(f"a token id is negative: {int(values.min())}")
        if self._decoder is not None:
            return str(self._decoder.decode(self._tokens.take(values, mode="clip").tolist()))
        return str(self._backend.decode(values.tolist(), skip_special_tokens=False))

    def decode_between(self, ids: npt.NDArray[np.integer], cuts: Sequence[int]) -> list[str]:
        """The texts before, between and after the tokens at the positions `cuts`, which ascend."""
        if self._table is not None:
            return self._table.decode_between(ids, cuts)
        starts = [0, *(cut + 1 for cut in cuts)]
        ends = [*cuts, len(ids)]
        return [self.decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]

    def added_tokens(self) -> Mapping[int, AddedToken]:
        """By id, every token that is found whole in a text: special ones and tags."""
        found: Mapping[int, AddedToken] = self._backend.get_added_tokens_decoder()
        return found

    def special_tokens(self) -> dict[str, int]:
        """The spelling and id of every token that the tokenizer itself calls special."""
        return {token.content: token_id for token_id, token in self.added_tokens().items() if token.special}

    def copy_of_backend(self) -> Backend:
        """What the library encodes with, for whoever needs to encode in another way. Takes a second."""
        return Backend.from_str(self._backend.to_str())

    def apply_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object],
        generation_prompt: bool = True,
        opened_at: float = 0.0,
    ) -> str:
        """`messages`, and the generation prompt unless it is not wanted, as the chat template writes them.

        To the template it is `opened_at` (Unix seconds), in UTC. `template_kwargs` must not hold any of
        `reserved_kwargs`: those would replace the template or change what is done with it. Raises whatever
        the template raises, and `TokenizerError` for a template with a clock that cannot be stopped. The
        compiled template is cached.
        """
        template = self._hf.get_chat_template(tools=tools)
        has_clock = clock.NAME in template
        if not prepare(template) and has_clock:
            raise TokenizerError("this version of transformers gives chat templates no date but today's")
        with clock.stopped_at(opened_at) if has_clock else nullcontext():
            text = self._hf.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **template_kwargs,
            )
        return str(text)

    def _byte_table(self, vocabulary: Mapping[str, int]) -> ByteTable | None:
        """The fast decoder, if it decodes the whole vocabulary as the tokenizer itself does."""
        if not isinstance(self._backend.decoder, ByteLevel):
            return None
        table = ByteTable(vocabulary)
        ids = sorted(vocabulary.values())
        same = table.decode(ids) == self._backend.decode(ids, skip_special_tokens=False)
        return table if same else None

    def _digest(self, vocabulary: Mapping[str, int]) -> str:
        # The vocabulary, not the library's serialisation of it, which changes between versions.
        digest = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode())
        # A tokenizer may carry several named templates: then this is a mapping.
        digest.update(json.dumps(self._hf.chat_template, sort_keys=True).encode())
        return digest.hexdigest()[:16]


def _by_id(vocabulary: Mapping[str, int], size: int) -> npt.NDArray[np.object_]:
    """The tokens by id, and one that is empty for every id above them."""
    tokens = np.full(size + 1, "", dtype=object)
    tokens[list(vocabulary.values())] = list(vocabulary)
    return tokens


def _reserved_kwargs(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """The arguments of `apply_chat_template` that are not the template's, and those we fill ourselves."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return frozenset(parameters) - {"documents", "kwargs"} | {"messages", clock.NAME}
