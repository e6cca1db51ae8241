"""Recorded ids against the template's own rendering of the same messages, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokentape_core.text.messages import Message
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.segments import Segments
from tokentape_core.texts import common_start

__all__ = ["MAX_MISMATCHES", "MAX_TEXT_CHARS", "Kind", "find_mismatches"]

Kind = Literal["special_token_count", "special_token_type", "non_assistant_text", "assistant_text"]

MAX_MISMATCHES = 100
"""So many entries at most; the last one then says that there are more."""
MAX_TEXT_CHARS = 200
"""A text in an entry is cut to so many characters."""

# After a difference in the special tokens the two sides are in step again where so many agree in a row,
_IN_STEP = 4
# and not more than so many, both sides together, are skipped.
_MAX_SKIP = 24


def find_mismatches(
    renderer: ChatRenderer,
    tokens: npt.NDArray[np.int32],
    messages: Sequence[Message],
    *,
    sampled: npt.NDArray[np.bool_],
    tools: Sequence[Mapping[str, object]] | None = None,
    template_kwargs: Mapping[str, object] | None = None,
    opened_at: float = 0.0,
) -> list[dict[str, Any]]:
    """Where the template would now write something else than `tokens` (shape [T]); [] if nowhere.

    `messages` are the path's, the last one generated; `sampled` (shape [T]) is True on generated tokens;
    `opened_at` is that of the session, as `ChatRenderer` has it.
    Both sides are cut at special tokens and compared as text, so that other tokens for the same text are no
    mismatch. What follows the last generated token, and the token that ends the last turn, do not count.

    Each entry has `type`, `segment_index` (special tokens and texts of the recording counted from 0),
    `expected_text` (the template's), `actual_text` (the recorded one), cut to `MAX_TEXT_CHARS` characters
    from the first difference on, `generated`, and `detail`. `generated` is true if the model itself sampled
    what differs; otherwise the prompts do. The types:

    - `special_token_count`: one side has special tokens that the other lacks, as where the template drops
      earlier reasoning that stands in a message of its own. The comparison goes on where both sides agree
      again.
    - `special_token_type`: as many, but others.
    - `non_assistant_text`: a text that was not generated differs. That is a bug, or a template that rewrites
      what others wrote (a date, a hint in the last user message).
    - `assistant_text`: a generated text differs, as where a client's JSON has other spaces. Expected drift.

    Raises `RenderError` if the template refuses these messages, as it may a generated call that is not JSON,
    and `ValueError` if `sampled` has another length than `tokens`.
    """
    if len(sampled) != len(tokens):
        raise ValueError(f"the mask has {len(sampled)} entries for {len(tokens)} tokens")
    expected = renderer.segments(messages, tools=tools, template_kwargs=template_kwargs, opened_at=opened_at)
    generated = np.flatnonzero(sampled)
    end = int(generated[-1]) + 1 if generated.size else len(tokens)
    if _is_equal(renderer, tokens[:end], expected):
        return []
    actual, positions = renderer.splitter.of_ids(tokens[:end])
    _drop_end(renderer, actual)
    _drop_end(renderer, expected)
    recording = _Recording(renderer, actual, tokens[:end], sampled[:end], positions)
    found: list[dict[str, Any]] = []
    for entry in _compare(expected, recording):
        if len(found) == MAX_MISMATCHES:
            found[-1] = _entry("special_token_count", -1, "", "", False, "there are more mismatches")
            break
        found.append(entry)
    return found


def _is_equal(renderer: ChatRenderer, tokens: npt.NDArray[np.int32], expected: Segments) -> bool:
    """Whether the template would write these tokens, but for space at the end: the common case, found fast.

    The same text is not enough: a special token may have been sampled in pieces, spelled out.
    """
    recorded, text = renderer.tokenizer.decode(tokens), expected.text
    if not text.startswith(recorded) or text[len(recorded) :].strip():
        return False
    return renderer.splitter.count_in_ids(tokens) == len(expected.specials)


def _drop_end(renderer: ChatRenderer, segments: Segments) -> None:
    """Leave out the token that ends the last turn, and the space that a template writes after it."""
    closed = bool(segments.specials) and renderer.boundary.is_spelled(segments.specials[-1])
    if closed and not segments.texts[-1].strip():
        segments.specials.pop()
        segments.texts.pop()


class _Recording:
    """The segments of the recorded ids, and which of them were generated."""

    def __init__(
        self,
        renderer: ChatRenderer,
        segments: Segments,
        tokens: npt.NDArray[np.int32],
        sampled: npt.NDArray[np.bool_],
        positions: npt.NDArray[np.intp],
    ) -> None:
        self.segments = segments
        self._renderer = renderer
        self._tokens = tokens
        self._sampled = sampled
        self._positions = positions

    def span(self, start: int, end: int) -> slice:
        """The tokens of the texts `start` to `end` and of the special tokens between them."""
        first = int(self._positions[start - 1]) + 1 if start else 0
        last = int(self._positions[end]) if end < len(self._positions) else len(self._tokens)
        return slice(first, last)

    def is_generated(self, start: int, end: int) -> bool:
        """Whether any token there was generated."""
        return bool(self._sampled[self.span(start, end)].any())

    def is_drift(self, index: int, expected: str) -> bool:
        """Whether `expected` differs from text `index` only where tokens were, or could be, generated.

        What was not generated stands before and after that place.
        """
        span = self.span(index, index)
        generated = np.flatnonzero(self._sampled[span])
        if generated.size:
            first, last = int(generated[0]), int(generated[-1]) + 1
        elif span.stop < len(self._sampled) and self._sampled[span.stop]:
            first = last = span.stop - span.start  # the output begins with the special token after it
        elif span.start and self._sampled[span.start - 1] and not self._ends_turn(span.start - 1):
            first = last = 0  # the output ends with the special token before it
        else:
            return False
        decode = self._renderer.tokenizer.decode
        before = decode(self._tokens[span.start : span.start + first])
        after = decode(self._tokens[span.start + last : span.stop])
        fits = len(before) + len(after) <= len(expected)
        return fits and expected.startswith(before) and expected.endswith(after)

    def _ends_turn(self, position: int) -> bool:
        return self._renderer.boundary.is_boundary(int(self._tokens[position]))


def _compare(expected: Segments, recording: _Recording) -> Iterator[dict[str, Any]]:
    actual = recording.segments
    i = j = 0
    while True:
        skip = _skip(expected, actual, i, j) if _differ(expected, actual, i, j) else None
        if skip is None:
            want, got = expected.texts[i], actual.texts[j]
            if want != got:
                drift = recording.is_drift(j, want)
                yield _entry("assistant_text" if drift else "non_assistant_text", 2 * j, want, got, drift)
        else:
            more, less = skip
            kind: Kind = "special_token_type" if more == less else "special_token_count"
            generated = recording.is_generated(j, j + less)
            detail = f"{more} special tokens expected, {less} recorded"
            yield _entry(kind, 2 * j, expected.join(i, i + more), actual.join(j, j + less), generated, detail)
            i, j = i + more, j + less
        if i == len(expected.specials) and j == len(actual.specials):
            return
        i, j = i + 1, j + 1


def _differ(expected: Segments, actual: Segments, i: int, j: int) -> bool:
    return expected.specials[i : i + 1] != actual.specials[j : j + 1]


def _skip(expected: Segments, actual: Segments, i: int, j: int) -> tuple[int, int]:
    """How many special tokens of each side to skip, as few as possible, until both are in step again."""
    window = _MAX_SKIP + _IN_STEP
    wanted, given = expected.specials[i : i + window], actual.specials[j : j + window]
    for skipped in range(1, _MAX_SKIP + 1):
        # Equal numbers first: a token of another kind is likelier than one more here and one more there.
        for more in sorted(range(skipped + 1), key=lambda more: abs(2 * more - skipped)):
            less = skipped - more
            if more > len(wanted) or less > len(given):
                continue
            if wanted[more : more + _IN_STEP] == given[less : less + _IN_STEP]:
                return more, less
    return len(expected.specials) - i, len(actual.specials) - j


def _entry(
    kind: Kind, index: int, expected: str, actual: str, generated: bool, detail: str = ""
) -> dict[str, Any]:
    # Both are cut at the same place, a little before their first difference.
    shared = common_start(expected, actual)
    start = max(0, shared - MAX_TEXT_CHARS // 4) if max(len(expected), len(actual)) > MAX_TEXT_CHARS else 0
    end = start + MAX_TEXT_CHARS
    return {
        "type": kind,
        "segment_index": index,
        "expected_text": expected[start:end],
        "actual_text": actual[start:end],
        "generated": generated,
        "detail": detail,
    }
