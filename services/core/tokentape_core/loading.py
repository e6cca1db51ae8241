"""Functions that users name by their import path: matchers and hooks."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tokentape_contracts.errors import MatcherFailed
from tokentape_core.domain.match import MATCHERS, Matcher, Message


class LoadError(Exception):
    """A function cannot be used; names it and says why. For the operator, at start-up."""


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module.function`.

    Raises:
        LoadError: it is not there, its module cannot be imported, or it is async: hooks and matchers are
            called where nothing may be awaited.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise LoadError(f"{path!r} is not an import path like package.module.function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever a user's module raises when it is imported
        raise LoadError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise LoadError(f"{path} is not a function")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise LoadError(f"{path} is async; a plain function is needed")
    return function  # type: ignore[no-any-return]


def load_matcher(name: str) -> Matcher:
    """A matcher by its name, or by its import path.

    One of the user's is guarded: whatever it raises, and an answer that is no bool, becomes `MatcherFailed`.

    Raises:
        LoadError: there is none.
    """
    if name in MATCHERS:
        return MATCHERS[name]
    if "." not in name:
        raise LoadError(f"no matcher {name!r}; there are {', '.join(MATCHERS)}, or give an import path")
    matcher = load_function(name)

    def guarded(stored: Message, incoming: Message) -> bool:
        try:
            answer = matcher(stored, incoming)
        except Exception as error:
            raise MatcherFailed(f"matcher {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise MatcherFailed(f"matcher {name} answered {answer!r}, not true or false")
        return answer

    return guarded
