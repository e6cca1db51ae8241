"""What every layer asks of plain text."""

import json
from typing import Any

from tokentape_contracts import limits


def common_start(a: str, b: str) -> int:
    """How many characters the two have in common at the start: where they first differ, if they do."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def read_json(text: str, **how: Any) -> Any:
    """The value of a JSON text that stands in another one, such as a tool call's arguments.

    Raises `ValueError` for what is no JSON, or holds more than `limits.JSON_VALUES` commas and brackets: the
    body's own check does not look into its strings. Raises `RecursionError` for what nests too deeply.
    """
    if text.count(",") + text.count("[") + text.count("{") > limits.JSON_VALUES:
        raise ValueError(f"it holds more than {limits.JSON_VALUES} values")
    return json.loads(text, **how)
