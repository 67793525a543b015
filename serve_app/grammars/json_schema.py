"""Owns the checks on a JSON schema before it becomes a grammar, and how JSON is written: on one line.
Never interprets a schema; llguidance does, and names the keywords that it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

from serve_app.grammars.notation import Grammar, GrammarRefused, Json
from serve_app.grammars.schema_numbers import as_integers, check_numbers, fractions, with_kept_bounds
from serve_app.grammars.schema_parts import bare, dicts, inside, rewritten, subschemas, texts
from serve_app.grammars.schema_patterns import CODES, kept_pattern, uncoded_pattern
from serve_app.grammars.schema_work import check_work

MAX_SCHEMA_BYTES = 64 * 2**10
MAX_NESTING = 32
"""Limits how deep a schema's objects and lists are nested, because its readers recurse."""

MAX_REMEMBERED_CHARS = 4096
"""The longest schema whose kept form is remembered."""

WRITTEN = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": True}
"""As `json.dumps` writes it, and as chat templates show it. Small models never get out of free white space."""

_WITHOUT_CODES = {"json_allowed_escapes": 'nrbtf\\"'}
r"""llguidance does not know that `\u0061` is an `a`, and would take it for a key that the schema does not name."""
_CODED = re.compile(f"[{CODES}]")

_MAY_CHANGE = re.compile(
    '"(?:const|enum|multipleOf|pattern|patternProperties|minProperties|(?:exclusiveM|m)(?:in|ax)imum)"'
)
"""The keywords that `kept` looks at. A property may have such a name, too."""
_IGNORED = ("nullable", "x-guidance")
"""Keywords that llguidance silently ignores, or that are its own and not for clients to set."""


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
    check_nesting(schema)
    _check_size(json.dumps(schema, ensure_ascii=False))
    for part in subschemas(schema):
        for name in _IGNORED:
            if part.get(name) not in (None, False):
                raise GrammarRefused(f"the schema's keyword {name!r} is not supported")
    if _admits_further_keys(schema) and any(_CODED.search(text) for text in texts(schema)):
        text = "should have `additionalProperties: false` in every object that names properties"
        raise GrammarRefused(f"{text}, because it has control characters that JSON writes as codes such as \\u001b")
    kept(bare(with_fragments(schema)))
    return schema


def kept(schema: Json) -> Json:
    """Return the schema as llguidance keeps it.

    Raises:
        GrammarRefused: llguidance would not keep it, or it is too much work.
    """
    check_nesting(schema)
    text = json.dumps(schema)
    if not _MAY_CHANGE.search(text):
        return schema
    return _kept_again(text) if len(text) <= MAX_REMEMBERED_CHARS else _kept(schema)


@lru_cache(1024)
def _kept_again(text: str) -> Json:
    """Agents bring the same tools with each request. What is returned is never changed."""
    return _kept(json.loads(text))


def _kept(schema: Json) -> Json:
    check_work(schema)
    broken = fractions(schema)
    written: Json = rewritten(schema, lambda part: with_kept_bounds(_with_kept_words(part), broken))
    check_numbers(written)
    return written


def _with_kept_words(part: Json) -> Json:
    _check_least(part)
    written = part | {name: as_integers(part[name]) for name in ("const", "enum") if name in part}
    return _with_patterns(written, kept_pattern)


def _check_least(part: Json) -> None:
    """Refuse a count of properties that a key written twice would meet."""
    least, required = part.get("minProperties"), part.get("required")
    most = 1 + (len(required) if isinstance(required, list) else 0)
    is_open = part.get("additionalProperties") is not False or part.get("patternProperties")
    if is_open and isinstance(least, int) and least > most:
        text = f"the schema's minProperties should be at most {most}, one more than the keys that it requires"
        raise GrammarRefused(f"{text}, because a further key may be written twice, but it is {least}")


def _written(schema: Json) -> Json:
    written = kept(bare(with_fragments(schema)))
    if not _admits_further_keys(schema):
        return written | {"x-guidance": WRITTEN}
    uncoded: Json = rewritten(written, lambda part: _with_patterns(part, uncoded_pattern))
    return uncoded | {"x-guidance": WRITTEN | _WITHOUT_CODES}


def _with_patterns(part: Json, write: Callable[[str], str]) -> Json:
    written = dict(part)
    if isinstance(pattern := part.get("pattern"), str):
        written["pattern"] = write(pattern)
    if isinstance(named := part.get("patternProperties"), dict):
        patterns = {write(pattern): schema for pattern, schema in named.items()}
        if len(patterns) == len(named):  # llguidance refuses them otherwise
            written["patternProperties"] = patterns
    return written


def _admits_further_keys(schema: Json) -> bool:
    """Return whether an object may have further keys besides those that have schemas of their own. A reference may lead
    anywhere, so everything that looks like an object's schema counts as one."""
    return any(
        any(part.get(name) for name in ("properties", "patternProperties", "required"))
        and part.get("additionalProperties") is not False
        for part in dicts(schema)
    )


def with_fragments(schema: Json) -> Json:
    """Return the schema, copied if need be, with every reference as `fragment` writes it."""
    if not any(_is_rootless(part.get("$ref")) for part in subschemas(schema)):
        return schema
    written = deepcopy(schema)
    for part in subschemas(written):
        if _is_rootless(part.get("$ref")):
            part["$ref"] = fragment(part["$ref"])
    return written


def fragment(reference: str) -> str:
    """Write a reference to `/$defs/...` as `#/$defs/...`. litellm sends the former to Anthropic's API, and it names no
    document that a server could read."""
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


def check_nesting(schema: Json) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [inner for value in level for inner in inside(value) if isinstance(inner, dict | list)]
        if not level:
            return
    raise GrammarRefused(f"should be nested at most {MAX_NESTING} deep, but it is deeper")
