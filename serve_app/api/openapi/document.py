"""Writes the OpenAPI document from the operations and the models' own JSON Schemas.
Never describes a field by hand: a body's fields are those of its model, and fields that are refused are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from serve_app.api.http.generation_response import PROCESSING_MS
from serve_app.api.http.hint_header import HEADER as HINTS_HEADER
from serve_app.api.openapi.operations import OPERATIONS, Operation

Json = dict[str, Any]

_ERRORS = {
    400: "The request is wrong; the error names the field.",
    401: "The key is missing or unknown.",
    403: "The key is not an admin key, the server has no admin key, or the config does not allow the operation.",
    404: "No model, live request or kept response has that name.",
    408: "The body did not arrive.",
    409: "The adapter was unloaded while it was loaded.",
    413: "The body is too large.",
    415: "The body is not JSON, or has a content encoding.",
    429: "A limit of this key is reached.",
    500: "The server failed.",
    503: "Try again later: the server is overloaded or draining, or no engine answers.",
    504: "The request's deadline has passed.",
}
_TRY_AGAIN = (429, 503)
_REQUEST_ID: Json = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "A name for the request, of 1 to 128 letters, digits or ._:-; any other name is replaced. "
    "The response's header has the name in use.",
    "schema": {"type": "string"},
}
_HINTS: Json = {
    HINTS_HEADER: {
        "description": "The hints of the request that had no effect, separated by commas; absent if there are none.",
        "schema": {"type": "string"},
    }
}
_KEY_NAMES = {"api key": ("apiKey", "apiKeyHeader"), "admin key": ("adminKey", "adminKeyHeader")}


@dataclass(frozen=True, slots=True)
class Access:
    """Whether the config has API keys, which are then required, and an admin key, which the admin routes require."""

    keys: bool
    admin: bool

    def has_key(self, operation: Operation) -> bool:
        return {"nothing": False, "api key": self.keys, "admin key": self.admin}[operation.needs]

    def is_closed(self, operation: Operation) -> bool:
        return operation.needs == "admin key" and not self.admin


class _Schemas:
    """Holds the models' schemas, with the parts that they share in `components`."""

    def __init__(self, models: Sequence[type[BaseModel]]) -> None:
        inputs = [(model, "validation", TypeAdapter(model)) for model in dict.fromkeys(models)]
        self._schemas, shared = TypeAdapter.json_schemas(
            inputs,  # type: ignore[arg-type]
            ref_template="#/components/schemas/{model}",
            schema_generator=_WithoutFieldTitles,
        )
        self.components: Json = shared["$defs"]

    def schema_of(self, model: type[BaseModel]) -> Json:
        return self._schemas[model, "validation"]


class _WithoutFieldTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title would only repeat the field's name


def openapi_document(version: str, access: Access) -> Json:
    """Write the document. Operations that need a key declare it; admin routes without an admin key only answer 403."""
    schemas = _Schemas([model for one in OPERATIONS for model in _models(one)])
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas, access)
    components: Json = {"schemas": schemas.components}
    if schemes := _security_schemes(access):
        components["securitySchemes"] = schemes
    info = {"title": "chunkserve", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _models(operation: Operation) -> list[type[BaseModel]]:
    return [
        model for model in (operation.body, operation.answer, operation.chunk, operation.error) if model is not None
    ]


def _operation(operation: Operation, schemas: _Schemas, access: Access) -> Json:
    written: Json = {"summary": operation.summary, "operationId": _operation_id(operation)}
    written["parameters"] = [*operation.parameters, _REQUEST_ID]
    if operation.body is not None:
        content = {"application/json": {"schema": schemas.schema_of(operation.body)}}
        written["requestBody"] = {"required": True, "content": content}
    written["responses"] = {str(status): _error(status, schemas, operation) for status in _errors(operation, access)}
    if not access.is_closed(operation):
        written["responses"] = {"200": _success(operation, schemas)} | written["responses"]
    if access.has_key(operation):
        written["security"] = [{name: []} for name in _KEY_NAMES[operation.needs]]
    return written


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
    return "_".join([operation.method, *filter(None, words)])


def _errors(operation: Operation, access: Access) -> list[int]:
    if access.is_closed(operation):
        return [403]
    key_errors = {"nothing": (), "api key": (401,), "admin key": (401, 403)}[operation.needs]
    return sorted({*operation.errors, 500, *(key_errors if access.has_key(operation) else ())})


def _error(status: int, schemas: _Schemas, operation: Operation) -> Json:
    error: Json = {"description": _ERRORS[status]}
    headers = dict(_HINTS if operation.tells_hints else {})
    if status in _TRY_AGAIN:
        headers["Retry-After"] = {"description": "Seconds.", "schema": {"type": "integer"}}
    if headers:
        error["headers"] = headers
    return error | {"content": {"application/json": {"schema": schemas.schema_of(operation.error)}}}


def _success(operation: Operation, schemas: _Schemas) -> Json:
    success: Json = {"description": "Done."}
    if not operation.media_type:
        return success
    schema = {} if operation.answer is None else {"schema": schemas.schema_of(operation.answer)}
    success["content"] = {operation.media_type: schema}
    if operation.tells_hints:
        success["headers"] = dict(_HINTS)
    if operation.chunk is not None:
        events = {"type": "string", "description": f"Server-sent events: {operation.events}."}
        # OpenAPI 3.1 has no keyword for the events of a stream.
        success["content"]["text/event-stream"] = {"schema": events, "x-event-data": schemas.schema_of(operation.chunk)}
        success["headers"] = success.get("headers", {}) | {
            PROCESSING_MS: {"description": "Milliseconds.", "schema": {"type": "integer"}}
        }
    return success


def _security_schemes(access: Access) -> Json:
    schemes: Json = {}
    for is_set, (bearer, header) in ((access.keys, _KEY_NAMES["api key"]), (access.admin, _KEY_NAMES["admin key"])):
        if is_set:
            schemes[bearer] = {"type": "http", "scheme": "bearer"}
            schemes[header] = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    return schemes
