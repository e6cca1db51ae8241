"""Requests that schemathesis makes from the committed OpenAPI document, valid and invalid ones."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.docs.markdown import DOCS
from tests.fuzz.conftest import FUZZ
from tests.fuzz.test_bodies import Api
from tokentape_contracts import limits
from tokentape_core.text.tokenizer import Tokenizer

SCHEMA = schemathesis.openapi.from_dict(json.loads((DOCS / "reference" / "openapi.json").read_text()))
OPERATIONS = {
    f"{operation.method.upper()} {operation.path}": operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())
}
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
KINDS = [
    (name, mode)
    for name, operation in OPERATIONS.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # Without parameters and a body there is nothing to get wrong.
    if mode is GenerationMode.POSITIVE or "sid" in name or operation.body
]


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer) -> Iterator[Api]:
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "QUEUE_DEPTH", 0)
    made = Api(tokenizer)
    yield made
    made.close()
    patch.undo()


def ask(api: Api, case: Case) -> Any:
    """Sends the case as it is."""
    given = case.as_transport_kwargs(base_url="http://api")
    given.pop("cookies", None)
    sent = {
        "params": given.get("params"),
        "headers": {name: str(value) for name, value in (given.get("headers") or {}).items()},
        "json": given.get("json"),
        "content": given.get("data"),
    }
    return api.request(case.method, case.formatted_path, **{k: v for k, v in sent.items() if v is not None})


@pytest.mark.parametrize(("name", "mode"), KINDS, ids=[f"{name} {mode.value}" for name, mode in KINDS])
def test_every_answer_is_in_the_document(api: Api, name: str, mode: GenerationMode) -> None:
    """No 500, no hang, and status, content type, headers and body are as the document says."""

    @given(OPERATIONS[name].as_strategy(generation_mode=mode), st.booleans())
    @settings(
        FUZZ, max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
    )
    def check(case: Case, known: bool) -> None:
        if known and "sid" in case.path_parameters:
            case.path_parameters["sid"] = api.opened(turns=1).rpartition("/")[2]
        reply = ask(api, case)
        assert reply.status_code != 500
        case.validate_response(reply, checks=CHECKS)

    check()
