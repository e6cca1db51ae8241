"""The reference pages say what the code has, no more and no less."""

import argparse
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
from starlette.routing import Route

import tokentape_driver
from tests.docs.markdown import DOCS, headings, rows, sections
from tokentape_api.app import build_app
from tokentape_api.settings import ApiSettings
from tokentape_cli import options
from tokentape_cli.main import build_parser
from tokentape_contracts.accounting import Reason
from tokentape_contracts.errors import TABLE
from tokentape_contracts.events import TYPES
from tokentape_contracts.http import PIN_FIELDS
from tokentape_contracts.samples import WIRE
from tokentape_core.domain.match import MATCHERS
from tokentape_core.store import MemoryStore

REFERENCE = DOCS / "reference"
OPTIONS_WITH_VARIABLE = {
    *("api", "assembler", "config", "engine check", "export", "family check", "import", "replay", "up"),
}


def _commands() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    [commands] = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    return dict(commands.choices)


def test_every_command_and_option_is_documented() -> None:
    """Each command has a section with a row for each of its options, and its environment variable."""
    found = sections(REFERENCE / "command.md")
    for name, command in _commands().items():
        section = found.pop(f"tokentape {name}")
        taken = [a for a in command._actions if a.dest != "help"]
        flags = [a.option_strings[-1] for a in taken if a.option_strings]
        assert [
            a.metavar for a in taken if not a.option_strings and f"| `{a.metavar}` |" not in section
        ] == []
        assert [row.split()[0] for row in rows(section) if row.startswith("--")] == flags
        for flag in {f"--{o}" for o in options.OPTIONS} & set(flags) if name in OPTIONS_WITH_VARIABLE else ():
            assert f"`{options.variable(flag[2:])}`" in section
    assert list(found) == ["The command"]


def _routes() -> list[Route]:
    unused: Any = None
    settings = ApiSettings(engine_url="http://engine", tokenizer="t", redis_url="redis://r")
    app = build_app(settings, store=MemoryStore(), engine=unused, renderer=unused, collector=unused)
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_is_documented() -> None:
    """http.md has a section for each route of the application, and no other; ANY stands for the catch-all."""
    titles = [re.fullmatch(r"`([A-Z]+) (/\S*)`", heading) for heading in headings(REFERENCE / "http.md")]
    documented = {(title[1], title[2]) for title in titles if title}
    expected = set()
    for route in _routes():
        taken = (route.methods or set()) - {"HEAD"}
        # What takes every method refuses the wrong ones itself, but for the catch-all.
        names = taken if len(taken) == 1 else {"ANY" if "{path:path}" in route.path else "POST"}
        expected |= {(name, route.path.replace("{path:path}", "{path}")) for name in names}
    assert documented == expected


def test_every_value_that_a_request_may_have_is_documented() -> None:
    """http.md names each pin, each matcher, and each error that a route raises by its code."""
    page = (REFERENCE / "http.md").read_text()
    codes = {error.code for error in TABLE} - {"internal_error"}
    for name in (*PIN_FIELDS, *MATCHERS, *codes):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("name", TYPES)
def test_every_event_field_is_documented(name: str) -> None:
    """events.md has a row for each field of the event, in order, and names its version."""
    section = sections(REFERENCE / "events.md")[f"`{name}`"]
    kind = TYPES[name]
    assert rows(section) == ["Field", *(field.name for field in fields(kind))]
    assert f"Version {kind.VERSION}." in section


def test_every_samples_field_is_documented() -> None:
    """samples.md has a row for each field of the wire table, with the way it is carried and its dtype."""
    section = sections(REFERENCE / "samples.md")["The fields of a sample"]
    table = {row.split("`")[1]: row for row in section.splitlines() if row.startswith("| `")}
    assert list(table) == list(WIRE)
    for name, wire in WIRE.items():
        carried = "tensor" if wire.carried == "tensor" else "JSON"
        assert f"| {carried} |" in table[name]
        if wire.dtype is not None:
            assert f"| {wire.dtype.name}[" in table[name]
            assert ("strict" in table[name]) == wire.strict


def test_every_reason_of_the_accounting_is_documented() -> None:
    """samples.md has a row for each reason why sampled tokens are left out, in order."""
    section = sections(REFERENCE / "samples.md")["`accounting`"]
    assert rows(section) == ["reason", *Reason]


def test_every_public_name_of_the_driver_is_documented() -> None:
    """driver.md has a section for each name of `__all__`, and for no other."""
    names = [
        match[1] for title in headings(REFERENCE / "driver.md") if (match := re.fullmatch(r"`(\w+)`", title))
    ]
    assert sorted(names) == sorted(tokentape_driver.__all__)


def _callables() -> dict[str, list[Any]]:
    """Public name → the functions that its section must describe."""
    public = {name: getattr(tokentape_driver, name) for name in tokentape_driver.__all__}
    functions = {name: [value] for name, value in public.items() if inspect.isfunction(value)}
    for name in ("Session", "SyncClient", "TokentapeClient"):
        methods = [
            getattr(public[name], method) for method in vars(public[name]) if not method.startswith("_")
        ]
        functions[name] = [method for method in methods if inspect.isfunction(method)]
    return functions


@pytest.mark.parametrize("name", _callables())
def test_every_public_function_of_the_driver_is_described(name: str) -> None:
    """A section names each function, and each argument of those that are written out."""
    section = sections(REFERENCE / "driver.md")[f"`{name}`"]
    for function in _callables()[name]:
        assert function.__name__ in section
        if f"await session.{function.__name__}(" in section or function.__name__ == name:
            parameters = inspect.signature(function).parameters
            assert [p for p in parameters if p != "self" and p not in section] == []
