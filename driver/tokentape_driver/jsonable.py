"""What an agent says, as the JSON that a server can keep."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest


def jsonable(value: Any, where: str, depth: int = 0) -> Any:
    """The value built of None, booleans, numbers, strings, lists and dicts, with nothing changed by it.

    Tuples become lists, numpy's scalars and arrays numbers and lists of them. Everything else is refused,
    also what JSON libraries convert silently: NaN would come back as null, a date as a string.

    Args:
        where: names the value in errors, e.g. `metadata`.

    Raises:
        InvalidRequest: names the place, e.g. `metadata.steps[3]`.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(f"{where} is {value}, which JSON cannot hold")
        return float(value)
    if depth >= limits.JSON_DEPTH:
        raise InvalidRequest(f"{where} nests deeper than {limits.JSON_DEPTH} levels")
    if isinstance(value, Mapping):
        return {_key(key, where): jsonable(v, f"{where}.{key}", depth + 1) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(f"{where} is of type {type(value).__qualname__}, which JSON cannot hold")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequest(f"{where} has the key {key!r}; JSON's keys are strings")
    return key
