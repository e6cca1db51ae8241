"""What the engine counted and said of its weights, gathered over turns.

Engines send different counters, and none is needed for a sample to be right: what is no number is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tokentape_core.domain.state import Turn

_SPEC_COUNTERS: Final = {
    "spec_num_correct_drafts": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "spec_num_proposed_drafts": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "spec_verify_ct": ("spec_verify_ct",),
}
"""Our name of each speculative-decoding counter, and the names that SGLang gave it over time."""

_GREATEST: Final = 2**53
"""A greater number counts nothing, and sums of such would not fit into JSON."""


def prefix_cache_info(turns: Iterable[Turn]) -> dict[str, int]:
    """`cached_tokens` and `total_prompt_tokens`, added up; both always, as existing drivers need them."""
    metas = [turn.event.meta for turn in turns]
    return {
        "cached_tokens": sum(_number(meta.get("cached_tokens")) or 0 for meta in metas),
        "total_prompt_tokens": sum(_number(meta.get("prompt_tokens")) or 0 for meta in metas),
    }


def spec_info(turns: Sequence[Turn]) -> dict[str, int]:
    """The sums of the speculative-decoding counters that the engine sent; empty without any."""
    info: dict[str, int] = {}
    if not any(key.startswith("spec_") for turn in turns for key in turn.event.meta):
        return info
    for name, spellings in _SPEC_COUNTERS.items():
        values = [value for turn in turns if (value := _first(turn, spellings)) is not None]
        if values:
            info[name] = sum(values)
    if info:
        info["completion_tokens"] = sum(len(turn.event.output) for turn in turns)
    return info


def weight_versions(turns: Iterable[Turn]) -> list[str]:
    """The version of the weights behind each turn that has one, in order: that of its last token."""
    return [version for turn in turns if (version := _weight_version(turn.event.meta)) is not None]


def weight_version_spans(turn: Turn, size: int, offset: int) -> list[dict[str, Any]]:
    """Which weights sampled which of the turn's first `size` tokens: `{version, start, end}`, end excluded.

    Empty if the engine does not say it. An engine whose weights change in the middle of a generation gives
    several spans, relative to the turn's output.

    Args:
        offset: added to the positions.
    """
    spans = []
    for span in _spans(turn.event.meta):
        start, end = (min(max(span[edge], 0), size) for edge in ("start", "end"))
        if start < end:
            spans.append({"version": str(span["version"]), "start": offset + start, "end": offset + end})
    return spans


def _weight_version(meta: Mapping[str, Any]) -> str | None:
    version = meta.get("weight_version")
    if version is None and (spans := [span for span in _spans(meta) if span["start"] < span["end"]]):
        version = max(spans, key=lambda span: span["end"])["version"]
    return None if version is None else str(version)


def _spans(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    spans = meta.get("weight_versions")
    return [
        span
        for span in (spans if isinstance(spans, list) else ())
        if isinstance(span, dict)
        and span.get("version") is not None
        and all(type(span.get(edge)) is int for edge in ("start", "end"))
    ]


def _first(turn: Turn, counters: Sequence[str]) -> int | None:
    return next((v for name in counters if (v := _number(turn.event.meta.get(name))) is not None), None)


def _number(counter: Any) -> int | None:
    is_number = isinstance(counter, int | float) and not isinstance(counter, bool)
    return int(counter) if is_number and abs(counter) <= _GREATEST else None
