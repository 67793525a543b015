"""Owns what is asked of a JSON schema before it becomes a grammar, and how JSON is written: on one line.
Never reads what a schema means; llguidance does, and names the keywords that it does not know."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

from serve_app.grammars.notation import Grammar, GrammarRefused, Json
from serve_app.grammars.schema_parts import bare, dicts, inside, subschemas, texts

MAX_SCHEMA_BYTES = 64 * 2**10
MAX_NESTING = 32
"""Of a schema's objects and lists, one in the other: the readers on the way recurse."""

WRITTEN = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": True}
"""As `json.dumps` writes it, and as chat templates show it. Free white space is where small models do not find out."""

_WITHOUT_CODES = {"json_allowed_escapes": 'nrbtf\\"'}
r"""Of `\u0061` llguidance does not know that it is an `a`: beside the keys that a schema names, it would be another."""
_CODED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Letters that JSON writes as codes alone."""

_IGNORED = ("nullable", "x-guidance")
"""By llguidance in silence, or its own, which a client shall not set."""


def json_schema(schema: Json) -> Grammar:
    """Build the grammar of the JSON values that a schema allows.

    Raises:
        GrammarRefused: the schema is too large, or has a keyword that would be ignored.
    """
    return Grammar(({"name": "json", "json_schema": _written(checked(schema))},))


def any_object() -> Grammar:
    return json_schema({"type": "object"})


def json_rule(schema: Json) -> str:
    """Write a checked schema as a part of a Lark rule."""
    return f"%json {json.dumps(_written(schema), ensure_ascii=False, separators=(',', ':'))}"


def read_schema(text: str) -> Json:
    """Read a schema that came as text.

    Raises:
        GrammarRefused: the text is no schema.
    """
    _check_size(text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused("should be a JSON schema, but it is not JSON") from error
    if not isinstance(schema, dict):
        raise GrammarRefused("should be a JSON schema, which is an object")
    return schema


def checked(schema: Json) -> Json:
    """Return the schema once it is checked.

    Raises:
        GrammarRefused: it is too large, or has a keyword that would be ignored.
    """
    _check_nesting(schema)
    _check_size(json.dumps(schema, ensure_ascii=False))
    for part in subschemas(schema):
        for name in _IGNORED:
            if part.get(name) not in (None, False):
                raise GrammarRefused(f"the schema's keyword {name!r} is not supported")
    if _admits_further_keys(schema) and any(_CODED.search(text) for text in texts(schema)):
        text = "should have `additionalProperties: false` in every object that names properties"
        raise GrammarRefused(f"{text}, because it has control characters that JSON writes as codes such as \\u001b")
    return schema


def _written(schema: Json) -> Json:
    codes = _WITHOUT_CODES if _admits_further_keys(schema) else {}
    return bare(with_fragments(schema)) | {"x-guidance": WRITTEN | codes}


def _admits_further_keys(schema: Json) -> bool:
    """Whether an object may have keys beside some that have schemas of their own. A reference may lead anywhere, so
    everything that looks like an object's schema counts as one."""
    return any(
        any(part.get(name) for name in ("properties", "patternProperties", "required"))
        and part.get("additionalProperties") is not False
        for part in dicts(schema)
    )


def with_fragments(schema: Json) -> Json:
    """The schema, a copy if need be, in which every reference is as `fragment` writes it."""
    if not any(_is_rootless(part.get("$ref")) for part in subschemas(schema)):
        return schema
    written = deepcopy(schema)
    for part in subschemas(written):
        if _is_rootless(part.get("$ref")):
            part["$ref"] = fragment(part["$ref"])
    return written


def fragment(reference: str) -> str:
    """A reference to `/$defs/...` as `#/$defs/...`: litellm sends them so to Anthropic's API, and they name no document
    that a server could read."""
    return f"#{reference}" if _is_rootless(reference) else reference


def _is_rootless(reference: Any) -> bool:
    return isinstance(reference, str) and reference.startswith("/$defs/")


def _check_size(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # from an escape, in a schema that came as text
        raise GrammarRefused("should be text, but it has half of a surrogate pair") from error
    if size > MAX_SCHEMA_BYTES:
        raise GrammarRefused(f"should have at most {MAX_SCHEMA_BYTES} bytes, but it has {size}")


def _check_nesting(schema: Json) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [inner for value in level for inner in inside(value) if isinstance(inner, dict | list)]
        if not level:
            return
    raise GrammarRefused(f"should be nested at most {MAX_NESTING} deep, but it is deeper")
