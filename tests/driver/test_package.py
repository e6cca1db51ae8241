"""The package as a whole."""

import subprocess
import sys

import tokentape_contracts.errors
import tokentape_driver
from tokentape_driver import errors

BLOCKED_IMPORT = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is not a dependency of the driver")

sys.meta_path.insert(0, Blocker())
import tokentape_driver
for name in tokentape_driver.__all__:
    getattr(tokentape_driver, name)
"""


def test_imports_without_extras() -> None:
    """The driver imports in a training image that has its base dependencies only."""
    blocked = {"arq", "redis", "starlette", "torch", "transformers", "uvicorn", "tokentape_core"}
    code = BLOCKED_IMPORT.format(blocked=blocked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_all_is_complete_and_sorted() -> None:
    """`__all__` is sorted, and holds every error class of the driver."""
    names = tokentape_driver.__all__
    assert names == sorted(names)
    defined = {n for n, v in vars(errors).items() if isinstance(v, type) and v.__module__ == errors.__name__}
    assert defined <= set(names)


def test_error_tree_is_documented() -> None:
    """Every error class of the driver stands in the tree at the head of its module."""
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert f"── {name} " in (errors.__doc__ or "")


def test_driver_errors_are_tokentape_errors() -> None:
    """One `except TokentapeError` catches whatever a server or the way to it can do."""
    assert issubclass(tokentape_driver.DriverError, tokentape_contracts.errors.TokentapeError)
