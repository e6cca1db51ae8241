"""How much memory an event takes: what a cache of sessions and a session itself are bounded by.

What many values share is not counted: keys that a parser has met before, `None`, `True`.
"""

import sys
from dataclasses import fields
from typing import Any, Final

import numpy as np

from tokentape_contracts.events import TYPES, Event

_EVENT: Final = 500
"""An event's own object, its place in the session's state, and what allocating them adds."""
_ARRAY: Final = 160
"""A numpy array on bytes that came from Redis, without these."""
_ONE_HOLDER: Final = 4
"""What `getrefcount` says of a key that one object has: three names for it here count too."""
_FEW: Final = 32
"""An object with more keys has its own: it is a map, not a form that many fill in."""
_NAMES: Final = {name: tuple(field.name for field in fields(kind)) for name, kind in TYPES.items()}


def size_of(event: Event) -> int:
    """Bytes of memory that the event takes as part of a session's state, about."""
    return _EVENT + sum(size_of_value(getattr(event, name)) for name in _NAMES[event.TYPE])


def size_of_value(value: Any) -> int:
    """Bytes of memory that a JSON value, or an array of numbers, takes with all that is in it, about."""
    # Not a function that calls itself: an answer may nest deeply.
    total = 0
    pending = [value]
    for value in pending:  # grows as it goes
        kind = type(value)
        if kind is str or kind is float or kind is int:
            total += sys.getsizeof(value)
        elif kind is dict:
            keys = map(sys.getsizeof if len(value) > _FEW else _size_if_alone, value)
            total += sys.getsizeof(value) + sum(keys)
            pending.extend(value.values())
        elif kind is list or kind is tuple:
            total += sys.getsizeof(value)
            pending.extend(value)
        elif kind is np.ndarray:
            total += _ARRAY + value.nbytes
        elif value is not None and kind is not bool:
            total += sys.getsizeof(value)
    return total


def _size_if_alone(key: str) -> int:
    """0 for a key that other objects have too."""
    return sys.getsizeof(key) if sys.getrefcount(key) <= _ONE_HOLDER else 0
