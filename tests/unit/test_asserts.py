"""The asserts of tests hold, under `python -O` too: `make test-optimized` would otherwise prove nothing."""

import os
import subprocess
import sys

import pytest

from tests.support.canary import ensure


def test_an_assert_of_a_test_holds() -> None:
    """An assert that fails raises, in a test module."""
    with pytest.raises(AssertionError, match="the test complains"):
        assert not sys.executable, "the test complains"


def test_an_assert_of_a_helper_holds() -> None:
    """And in a module that tests import."""
    with pytest.raises(AssertionError, match="the helper complains"):
        ensure(0)


def test_child_processes_are_optimised_as_this_one_is() -> None:
    """Servers that tests start run as the tests do, or `make test-optimized` would test half of it."""
    shown = subprocess.check_output([sys.executable, "-c", "import sys; print(sys.flags.optimize)"])
    expected = int(os.environ.get("PYTHONOPTIMIZE") or 0)
    assert (int(shown), sys.flags.optimize) == (expected, expected)
