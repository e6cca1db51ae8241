"""The error tree, its table, its bodies, and the picture of it that the module shows."""

import re
from collections.abc import Iterator

import pytest

from tokentape_contracts import errors
from tokentape_contracts.errors import (
    BY_CODE,
    TABLE,
    Actor,
    RequestError,
    RetryableError,
    ServerFault,
    TokentapeError,
    error_body,
    error_from_body,
    rule_of,
)

FAMILIES = (RequestError, RetryableError, ServerFault)


def _leaves(error: type[TokentapeError] = TokentapeError) -> Iterator[type[TokentapeError]]:
    """The classes of the contract without children; the driver hangs its own beneath the same root."""
    children = [child for child in error.__subclasses__() if child.__module__ == errors.__name__]
    if not children:
        yield error
    for child in children:
        yield from _leaves(child)


def test_every_error_has_a_row() -> None:
    """The table holds every class that can be raised, and no family."""
    assert set(_leaves()) == set(TABLE)


def test_every_error_belongs_to_one_family() -> None:
    """Each class is a direct child of one of the three families."""
    assert all(error.__mro__[1] in FAMILIES for error in TABLE)


def test_codes_are_distinct_and_say_their_class() -> None:
    """A code is the class's name in snake case, so no two are alike."""
    for error in TABLE:
        assert error.code == re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()
    assert {error.code: error for error in TABLE} == BY_CODE


@pytest.mark.parametrize(
    ("family", "statuses", "retryable", "actors"),
    [
        (RequestError, range(400, 500), False, {Actor.CALLER, Actor.OPERATOR}),
        (RetryableError, (429, 503, 504), True, {Actor.NOBODY, Actor.OPERATOR}),
        (ServerFault, (500, 502), False, {Actor.OPERATOR, Actor.MAINTAINER}),
    ],
)
def test_a_family_fixes_who_acts(
    family: type, statuses: range | tuple[int, ...], retryable: bool, actors: set[Actor]
) -> None:
    """The rows of a family agree on the kind of status, on retrying and on who may have to act."""
    for error, rule in TABLE.items():
        if issubclass(error, family):
            assert rule.status in statuses
            assert rule.retryable is retryable
            assert rule.actor in actors


def test_the_picture_in_the_docstring_is_the_table() -> None:
    """The tree that the module's docstring draws names every class once, with its family and status."""
    drawn, family = {}, ""
    for line in str(errors.__doc__).splitlines():
        if match := re.match(r"    [├└]── (\w+) ", line):
            family = match[1]
        elif match := re.match(r"    [│ ]   [├└]── (\w+) +(\d{3})  \S", line):
            assert match[1] not in drawn
            drawn[match[1]] = (family, int(match[2]))
    assert drawn == {
        error.__name__: (error.__mro__[1].__name__, rule.status) for error, rule in TABLE.items()
    }


@pytest.mark.parametrize("error", TABLE)
def test_an_error_crosses_the_wire(error: type[TokentapeError]) -> None:
    """The body that the server writes gives the driver the same class with the same detail."""
    body = error_body(error("what — happened"))
    again = error_from_body(body)
    assert type(again) is error
    assert again.detail == str(again) == "what — happened"
    assert body["error"]["retryable"] is rule_of(again).retryable
    assert body["error"]["actor"] == rule_of(again).actor


def test_the_body_has_the_shape_that_openai_clients_read() -> None:
    """`error` holds `message`, `type`, `param` and `code`, and ours beside them."""
    assert error_body(errors.QueueFull("full")) == {
        "error": {
            "message": "full",
            "type": "QueueFull",
            "param": None,
            "code": "queue_full",
            "retryable": True,
            "actor": "nobody",
        }
    }


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "error",
        {},
        {"error": None},
        {"error": "message"},
        {"error": {"message": "x"}},
        {"error": {"message": None, "code": "queue_full"}},
        {"error": {"message": "x", "code": "context_length_exceeded"}},
        {"error": {"message": "x", "code": ["queue_full"]}},
        {"error": {"message": "x", "code": 400}},
    ],
)
def test_a_foreign_body_is_none_of_ours(body: object) -> None:
    """A proxy's or an engine's error body gives None, not a guess and not a crash."""
    assert error_from_body(body) is None


def test_what_an_error_quotes_can_be_told() -> None:
    """Half characters become their escapes; all else stays."""
    error = TokentapeError("it says \ud83d, \udfff and ä\U0001f600\n")
    assert error.detail == str(error) == "it says \\ud83d, \\udfff and ä\U0001f600\n"
