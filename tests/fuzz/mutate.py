"""Strategies: random JSON, and valid things that were damaged."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

_text = st.one_of(
    st.text(max_size=8), st.sampled_from(["\x00", "\ud7ff", "<|im_end|>", "{{ x }}", "../..", "user", "tool"])
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-2, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    _text,
)
"""Whatever JSON has that holds nothing else."""

json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_text, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def damaged_json(draw: st.DrawFn, value: Any, others: Mapping[str, Any] | None = None) -> Any:
    """The value with up to three of its parts replaced, removed or added.

    Args:
        others: keys that may be added to an object, beside random ones, and what they may hold.
    """
    for _ in range(draw(st.integers(1, 3))):
        value = _damage(draw, value, others or {})
    return value


def _damage(draw: st.DrawFn, value: Any, others: Mapping[str, Any]) -> Any:
    if isinstance(value, dict) and draw(st.booleans() if value else st.just(True)):
        if value and draw(st.integers(0, 3)):
            key = draw(st.sampled_from(sorted(value)))
            rest = {name: inner for name, inner in value.items() if name != key}
            return rest if not draw(st.integers(0, 3)) else {**value, key: _damage(draw, value[key], {})}
        key = draw(st.one_of(_text, st.sampled_from(sorted(others))) if others else _text)
        return {**value, key: draw(others.get(key, json_values))}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _damage(draw, value[at], {}), *value[at + 1 :]]
    return draw(json_values)


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with up to three places cut, overwritten or filled."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.one_of(st.integers(0, 8), st.integers(0, len(data))))
        data = data[:at] + draw(st.binary(max_size=8)) + data[at + length :]
    return data
