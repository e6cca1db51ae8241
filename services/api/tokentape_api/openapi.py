"""The OpenAPI document of the HTTP API, made from its operations and from the tables of errors and limits.

`scripts/generate-docs` writes it to docs/reference/openapi.json. The catch-all is not in it: OpenAPI has no
path of any length.
"""

from collections.abc import Sequence

from tokentape_api import schemas
from tokentape_api.operations import Operation, operations
from tokentape_api.schemas import Json
from tokentape_contracts import limits
from tokentape_contracts.errors import BY_CODE, TABLE
from tokentape_contracts.http import RETRY_HEADER


def document(version: str) -> Json:
    """The OpenAPI 3.1 document.

    Args:
        version: of Tokentape.
    """
    paths: dict[str, Json] = {}
    for operation in operations():
        if operation.id:
            path = paths.setdefault(operation.path, {})
            path[operation.method.lower()] = _operation(operation)
            if "{sid}" in operation.path:
                path["parameters"] = [{"$ref": "#/components/parameters/sid"}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokentape",
            "version": version,
            "description": "Records LLM agents in RL rollouts as exact token ids and assembles training "
            "samples on the server. Beside these paths, any other below a session is forwarded to the "
            "engine, unrecorded: see http.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "parameters": {
                "sid": {
                    "name": "sid",
                    "in": "path",
                    "required": True,
                    "description": "A session's id.",
                    "schema": {"type": "string", "minLength": 1, "maxLength": limits.SESSION_ID_CHARS},
                }
            },
            "schemas": {"Error": schemas.ERROR, "Pins": schemas.PINS},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed if the server was started with --tokens-file. The scope that an "
                    "operation needs stands in its `security`; `admin` allows all of them.",
                }
            },
        },
    }


def _operation(operation: Operation) -> Json:
    said: Json = {
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": {**operation.replies, **_errors(operation)},
        "security": [{}, {"token": [operation.scope]}] if operation.scope else [],
    }
    if operation.parameters:
        said["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {"application/json": {"schema": operation.body}}
        said["requestBody"] = {"required": operation.needs_body, "content": content}
    return said


def _errors(operation: Operation) -> Json:
    """Status → the errors of that status."""
    by_status: dict[int, list[str]] = {}
    for code in operation.codes:
        by_status.setdefault(TABLE[BY_CODE[code]].status, []).append(code)
    return {
        str(status): {
            "description": ", ".join(f"`{code}`" for code in codes),
            "headers": {RETRY_HEADER: {"required": True, "schema": {"enum": ["true", "false"]}}},
            "content": {"application/json": {"schema": operation.error or _one_of(codes)}},
        }
        for status, codes in sorted(by_status.items())
    }


def _one_of(codes: Sequence[str]) -> Json:
    inner = {"properties": {"code": {"enum": codes}}, "required": ["code"]}
    return {"allOf": [{"$ref": "#/components/schemas/Error"}, {"properties": {"error": inner}}]}
