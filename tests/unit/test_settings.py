"""What the command's options accept."""

import argparse

import pytest

from tokentape_cli import options
from tokentape_contracts import limits


def _retention(text: str) -> int:
    given = argparse.Namespace(retention_s=text)
    value: int = options.resolve(given, ("retention-s",))["retention-s"].value
    return value


def test_retention() -> None:
    """From the shortest to the longest, and no second less or more."""
    for edge in (limits.RETENTION_MIN_S, limits.RETENTION_MAX_S):
        assert _retention(str(edge)) == edge
    for beyond in (limits.RETENTION_MIN_S - 1, limits.RETENTION_MAX_S + 1):
        with pytest.raises(options.UsageError, match="must be from 21600 to 2592000"):
            _retention(str(beyond))
