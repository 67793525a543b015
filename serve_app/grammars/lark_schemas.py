"""Owns the JSON schemas inside a client's Lark, `%json {...}`: llguidance keeps them as it does a schema of its own.
Never reads the rules around them."""

from __future__ import annotations

import json
import re
from typing import Any

from serve_app.grammars.json_schema import check_nesting, kept
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.schema_numbers import check_numbers
from serve_app.grammars.schema_parts import bare
from serve_app.grammars.schema_work import check_work

_WORD = "%json"
_PARTS = re.compile(
    r"""
      (?://|\#)[^\n]*
    | "(?:\\.|[^"\\\n])*"
    | /(?:\\.|[^/\\\n])+/
    | (?P<json>%json)
    """,
    re.VERBOSE,
)
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def with_kept_schemas(text: str) -> str:
    """Return a Lark grammar with its schemas as llguidance keeps them.

    Raises:
        GrammarRefused: llguidance would not keep one of them, or all of them are too much work.
    """
    if _WORD not in text:
        return text
    written, place = [], 0
    while (part := _PARTS.search(text, place)) is not None:
        written.append(text[place : part.end()])
        place = part.end()
        if part["json"] and (found := _schema_at(text, place)) is not None:
            schema, place = found
            check_nesting(schema)
            written.append(f" {_text_of(kept(bare(schema)))}")
    whole = "".join((*written, text[place:]))
    _check_all(whole)
    return whole


def _text_of(schema: Any) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # from an escape
        raise GrammarRefused("has a JSON schema with half of a surrogate pair") from error
    return text


def _check_all(text: str) -> None:
    """Check everything that might be a schema, wherever it stands: a missed one could end the process."""
    places = (match.end() for match in re.finditer(_WORD, text))
    schemas = [found[0] for place in places if (found := _schema_at(text, place)) is not None]
    check_work(schemas)
    for schema in schemas:
        check_numbers(schema)


def _schema_at(text: str, place: int) -> tuple[dict[str, Any], int] | None:
    space = _SPACE.match(text, place)
    assert space is not None
    try:
        schema, end = _DECODER.raw_decode(text, space.end())
    except RecursionError as error:
        raise GrammarRefused("has a JSON schema that is nested too deep") from error
    except ValueError:  # llguidance reports the error
        return None
    return (schema, end) if isinstance(schema, dict) else None
