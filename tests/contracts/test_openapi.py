"""The OpenAPI document says what the application has."""

import json
from typing import Any

import pytest
from starlette.routing import Route

from tests.docs.markdown import DOCS
from tokentape_api.app import build_app
from tokentape_api.operations import operations
from tokentape_api.settings import ApiSettings
from tokentape_contracts import limits
from tokentape_contracts.errors import TABLE
from tokentape_contracts.http import PIN_FIELDS, OpenRequest, SamplesRequest
from tokentape_core.domain.match import MATCHERS
from tokentape_core.store import MemoryStore

DOCUMENT: dict[str, Any] = json.loads((DOCS / "reference" / "openapi.json").read_text())
CODES = {operation.name: operation.codes for operation in operations() if operation.id}
SCOPES = {operation.name: operation.scope for operation in operations()}
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if method != "parameters"
}


def _routes() -> set[str]:
    unused: Any = None
    settings = ApiSettings(engine_url="http://engine", tokenizer="t", redis_url="redis://r")
    app = build_app(settings, store=MemoryStore(), engine=unused, renderer=unused, collector=unused)
    found = set()
    for route in app.routes:
        if isinstance(route, Route) and "{path:path}" not in route.path:
            methods = (route.methods or set()) - {"HEAD"}
            # What takes every method refuses all but POST by itself.
            found |= {f"{method} {route.path}" for method in (methods if len(methods) == 1 else {"POST"})}
    return found


def test_its_operations_are_the_routes() -> None:
    """Every route but the catch-all, and no other."""
    assert set(OPERATIONS) == _routes() == set(CODES)


def test_its_errors_are_the_table() -> None:
    """The schema of an error knows every code, and each is an answer of some operation with its status."""
    error = DOCUMENT["components"]["schemas"]["Error"]["properties"]["error"]["properties"]
    assert set(error["code"]["enum"]) == {error.code for error in TABLE}
    # Unknown paths and methods are of no operation.
    assert {code for codes in CODES.values() for code in codes} | {
        "route_not_found",
        "method_not_allowed",
    } == {error.code for error in TABLE}
    statuses = {error.code: str(rule.status) for error, rule in TABLE.items()}
    for name, codes in CODES.items():
        for code in codes:
            assert f"`{code}`" in OPERATIONS[name]["responses"][statuses[code]]["description"]


def test_its_scopes_are_the_table() -> None:
    """Each operation needs the scope that the application asks for."""
    for name, operation in OPERATIONS.items():
        scope = SCOPES[name]
        assert operation["security"] == ([{}, {"token": [scope]}] if scope else [])


def _schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = OPERATIONS[name]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def test_its_bodies_are_what_the_parsers_read() -> None:
    """The closed bodies have the fields that the parsers know; the bounds are those of the limits."""
    opening, collecting = _schema("POST /sessions"), _schema("POST /sessions/{sid}/samples")
    named = {"mode", "matcher", "altered_answer", "labels", "pins", "evaluation"}
    assert set(opening["properties"]) == named | PIN_FIELDS
    assert set(DOCUMENT["components"]["schemas"]["Pins"]["properties"]) == PIN_FIELDS
    OpenRequest.parse(json.dumps(dict.fromkeys(opening["properties"])).encode(), matchers=tuple(MATCHERS))
    SamplesRequest.parse(json.dumps(dict.fromkeys(collecting["properties"])).encode())
    assert set(collecting["properties"]) == set(SamplesRequest.__dataclass_fields__)
    assert collecting["properties"]["deadline_s"]["maximum"] == limits.COLLECT_DEADLINE_MAX_S
    assert opening["additionalProperties"] is collecting["additionalProperties"] is False


@pytest.mark.parametrize("name", [name for name in CODES if "sessions" in name])
def test_http_md_names_the_same_errors(name: str) -> None:
    """What the document says that an operation answers, the page says too."""
    page = (DOCS / "reference" / "http.md").read_text()
    assert [code for code in CODES[name] if f"`{code}`" not in page and code != "internal_error"] == []
