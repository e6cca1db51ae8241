"""The clock of chat templates: what `strftime_now` tells them while a session's messages are rendered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

__all__ = ["NAME", "stopped_at", "strftime_now"]

NAME: Final = "strftime_now"
"""What templates call to write a date."""

_stopped: ContextVar[datetime | None] = ContextVar("stopped", default=None)


@contextmanager
def stopped_at(seconds: float) -> Iterator[None]:
    """Within it, in this thread or task, it is always that time (Unix seconds), in UTC.

    Raises `ValueError` or `OverflowError` for a time that no calendar has.
    """
    token = _stopped.set(datetime.fromtimestamp(seconds, UTC))
    try:
        yield
    finally:
        _stopped.reset(token)


def strftime_now(format: str) -> str:  # noqa: A002  (the name that templates may give it by)
    """The date in this format; outside of `stopped_at` that of the machine, as transformers has it."""
    return (_stopped.get() or datetime.now()).strftime(format)
