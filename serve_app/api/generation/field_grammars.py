"""Builds the grammars that a request's own fields ask for, and refuses those that cannot be built.
Never looks at tools."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.api.requests.schema import GenerationRequest
from serve_app.api.requests.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from serve_app.errors.api_error import ApiError
from serve_app.grammars import texts
from serve_app.grammars.json_schema import any_object, json_schema, read_schema
from serve_app.grammars.notation import Grammar, GrammarRefused, Json, Specials
from serve_app.grammars.tags import Structure, structural_tags


def refused(field: str, text: str) -> ApiError:
    return ApiError(400, f"{field}: {text}", param=field, code="invalid_value")


def too_much_work(field: str, text: str) -> ApiError:
    """Make the error of a grammar that was accepted and became too much work in the engine."""
    return ApiError(400, f"{field}: {text}", param=field, code="grammar_limit_exceeded")


def field_grammar(request: GenerationRequest, specials: Specials) -> tuple[str, Grammar] | None:
    """Return the dotted name of the field that constrains the answer, and its grammar; None if no field does.

    Raises:
        ApiError: no grammar can be built from the field.
    """
    if request.response_format is not None and request.response_format.type != "text":
        return _of_format(request.response_format, specials)
    if request.structured_outputs is not None:
        return _of_outputs(request.structured_outputs, specials)
    if request.json_schema is not None:
        return _of_schema("json_schema", request.json_schema)
    if request.regex is not None:
        return _written("regex", texts.regex, request.regex)
    return None if request.ebnf is None else _written("ebnf", texts.grammar, request.ebnf)


def _of_format(given: ResponseFormat, specials: Specials) -> tuple[str, Grammar]:
    match given:
        case JsonSchemaFormat():
            return _of_schema("response_format.json_schema.schema", given.json_schema.schema_)
        case StructuralTagFormat():
            return _of_tags("response_format", given, specials)
    assert isinstance(given, JsonObjectFormat)
    if given.schema_ is not None:
        return _of_schema("response_format.schema", given.schema_)
    if given.value is not None:
        return _of_schema("response_format.value", given.value)
    return "response_format", any_object()


def _of_outputs(given: StructuredOutputs, specials: Specials) -> tuple[str, Grammar]:
    if given.json_ is not None:
        return _of_schema("structured_outputs.json", given.json_)
    if given.structural_tag is not None:
        return _of_tags("structured_outputs.structural_tag", given.structural_tag, specials)
    if given.regex is not None:
        return _written("structured_outputs.regex", texts.regex, given.regex)
    if given.grammar is not None:
        return _written("structured_outputs.grammar", texts.grammar, given.grammar)
    if given.choice is not None:
        choices = given.choice
        return _built("structured_outputs.choice", lambda: texts.choice(choices))
    return "structured_outputs.json_object", any_object()


def _of_schema(field: str, given: Json | str) -> tuple[str, Grammar]:
    return _built(field, lambda: json_schema(read_schema(given) if isinstance(given, str) else given))


def _of_tags(field: str, given: StructuralTagFormat, specials: Specials) -> tuple[str, Grammar]:
    structures = [Structure(one.begin, one.schema_, one.end) for one in given.structures]
    return _built(field, lambda: structural_tags(structures, given.triggers, specials))


def _written(field: str, read: Callable[[str], Grammar], text: str) -> tuple[str, Grammar]:
    return _built(field, lambda: read(text))


def _built(field: str, build: Callable[[], Grammar]) -> tuple[str, Grammar]:
    try:
        return field, build()
    except GrammarRefused as error:
        raise refused(f"{field}.{error.place}".rstrip("."), error.text) from error
