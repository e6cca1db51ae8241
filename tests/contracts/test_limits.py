"""Every bound has an explanation and a use."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from tokentape_contracts import limits

ROOT = Path(__file__).parents[2]
SOURCE = Path(str(limits.__file__)).read_text()
NAMES = [name for name in vars(limits) if name.isupper()]


def _docstrings() -> dict[str, str]:
    body = ast.parse(SOURCE).body
    return {
        node.target.id: after.value.value
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _used_names() -> set[str]:
    folders = ("contracts", "services", "driver")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "limits.py"]
    return set(re.findall(r"\b[A-Z][A-Z_]+\b", "\n".join(path.read_text() for path in files)))


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_says_what_it_bounds(name: str) -> None:
    """It has a docstring, and its value is above 0."""
    assert len(_docstrings()[name]) > 20
    assert getattr(limits, name) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_is_used(name: str) -> None:
    """A bound that no code reads would be a promise that nobody keeps."""
    assert name in _used_names()


def test_limits_fit_each_other() -> None:
    """The default deadline is allowed and lets existing drivers wait, and results outlive a repeat."""
    assert limits.COLLECT_DEADLINE_S < 120 < limits.COLLECT_DEADLINE_MAX_S
    assert limits.SMALL_BODY_BYTES <= limits.CHAT_BODY_BYTES
    assert limits.COLLECT_DEADLINE_S < limits.RESULT_TTL_S
    assert limits.SESSION_IDLE_S <= limits.RETENTION_S
