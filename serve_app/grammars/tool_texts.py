"""Owns the texts of a client's tools: what a definition in Lark, or a regex, becomes inside a call.
Never knows which tool it is."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from serve_app.grammars.check import find_fault
from serve_app.grammars.encodings import JSON_STRING
from serve_app.grammars.lark_rules import Lark, read_lark
from serve_app.grammars.lark_schemas import with_kept_schemas
from serve_app.grammars.nested import nested_rules
from serve_app.grammars.notation import GrammarRefused, lark
from serve_app.grammars.regular import lark_pattern, regex_pattern
from serve_app.grammars.texts import check_lark_depth

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")


@dataclass(frozen=True, slots=True)
class ToolText:
    """`pattern`: a JSON schema's, for the whole text. `nested`: a grammar that no regex can express. With neither, the
    text is free."""

    pattern: str | None = None
    nested: Lark | None = None
    num_chars: int = 0
    """The size of what the definition becomes."""


def lark_text(definition: str) -> ToolText:
    """
    Raises:
        GrammarRefused: it is not a grammar, or cannot be kept.
    """
    check_lark_depth(definition)
    definition = with_kept_schemas(definition)
    if fault := find_fault(lark(definition).text()):
        raise GrammarRefused(_PLACE.sub(r"line \1, column \2: ", fault))
    grammar = read_lark(definition)
    if "start" not in grammar.rules:
        raise GrammarRefused("should have a rule `start: ...`")
    with suppress(GrammarRefused):  # the language is not regular, or is large
        pattern = lark_pattern(grammar)
        return ToolText(pattern, num_chars=len(pattern))
    return ToolText(nested=grammar, num_chars=len(nested_rules(grammar, JSON_STRING)))


def regex_text(definition: str) -> ToolText:
    """
    Raises:
        GrammarRefused: it is not a regex that can be kept.
    """
    pattern = regex_pattern(definition)
    return ToolText(pattern, num_chars=len(pattern))
