"""Functions that users name by their import path."""

import pytest

from tokentape_contracts.errors import MatcherFailed
from tokentape_core.domain.match import strict
from tokentape_core.loading import LoadError, load_function, load_matcher

HOOKS = "tests.support.hooks"


def test_loads_functions() -> None:
    """A matcher has a built-in name or an import path; a hook has an import path."""
    assert load_matcher("strict") is strict
    assert load_matcher(f"{HOOKS}.same_role")({"role": "a"}, {"role": "a", "content": "x"}) is True
    assert load_function(f"{HOOKS}.everything")([1]) == [1]


@pytest.mark.parametrize(
    ("path", "mention"),
    [
        ("everything", "import path"),
        (f"{HOOKS}.", "import path"),
        ("no_such_package.hook", "ModuleNotFoundError"),
        (f"{HOOKS}.missing", "AttributeError"),
        (f"{HOOKS}.NOT_A_FUNCTION", "not a function"),
        (f"{HOOKS}.awaitable", "async"),
    ],
)
def test_refuses_what_cannot_be_called(path: str, mention: str) -> None:
    """A missing, async or impossible function is refused by its name, at start-up."""
    with pytest.raises(LoadError, match=mention) as refusal:
        load_function(path)
    assert path in str(refusal.value)


def test_unknown_matcher() -> None:
    """A name that is no matcher is refused with the known ones."""
    with pytest.raises(LoadError, match="loose_tool_call"):
        load_matcher("fuzzy")


@pytest.mark.parametrize(("name", "mention"), [("shrug", "answered None"), ("explode", "RuntimeError")])
def test_a_matcher_that_misbehaves(name: str, mention: str) -> None:
    """A matcher that raises, or answers neither true nor false, is an error that names it."""
    with pytest.raises(MatcherFailed, match=f"{name}.*{mention}"):
        load_matcher(f"{HOOKS}.{name}")({}, {})
