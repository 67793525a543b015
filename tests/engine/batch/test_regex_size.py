"""Owns the contract of the limit on the size of a grammar's regexes: one that would stall a step is refused before
llguidance sees it.
Never measures time."""

from __future__ import annotations

import json

import pytest

from engine.batch.grammar import Grammars
from engine.batch.regex_size import MAX_PARTS
from engine.step import GrammarError

DOUBLED = "start: A12\nA0: /a?/\n" + "\n".join(f"A{i}: A{i - 1} A{i - 1}" for i in range(1, 13))


def of_pattern(pattern: str) -> str:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    return json.dumps({"grammars": [{"json_schema": schema}]})


@pytest.mark.parametrize(
    "grammar",
    [of_pattern("^" + "a?" * 1001 + "b$"), of_pattern("^" + "(|a)" * 1001 + "$"), f"start: /{'a?' * 1001}/", DOUBLED],
    ids=["a?", "(|a)", "lark", "doubled"],
)
def test_a_regex_of_too_many_parts_is_refused_with_the_limit(grammar: str) -> None:
    with pytest.raises(GrammarError, match=f"a regex may have {MAX_PARTS} parts"):
        Grammars.of_bytes(262, 256).compile(grammar)


def test_parts_that_are_characters_are_not_counted() -> None:
    Grammars.of_bytes(262, 256).compile(of_pattern("^" + r"\\?[?*](?:a)" * 600 + "$"))
