"""Owns the contract of the limit on the size of a grammar's regexes: one that would stall a step is refused before
llguidance sees it.
Never measures time."""

from __future__ import annotations

import json

import pytest

from engine.batch.grammar import Grammars
from engine.batch.regex_size import MAX_PARTS, check_regexes, num_parts
from engine.step import GrammarError

EMPTY = (
    "(|a)",
    "(a|)",
    "(?:|a)",
    "(?:a|)",
    "(?i:|a)",
    "(?P<x>|a)",
    "(a|())",
    "(?:a|(?:))",
    "(a|(?i))",
    "(a||b)",
    "(?x)( |a)",
    "(?x)(a|\n)",
    "(?x)(?: # none\n|a)",
)
"""Ways to leave a part out without a sign of repetition. Some of them were not seen: 11 s went into a compilation."""
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


@pytest.mark.parametrize("part", EMPTY)
def test_each_way_to_leave_a_part_out_counts(part: str) -> None:
    assert num_parts(part * 5) >= 5


@pytest.mark.parametrize("part", ['(""|"a")', '("a"|"")', '(|"a")', '("a"| )', '( | "a")', '("a" ||"b")', "(E|A)"])
def test_each_way_to_leave_a_part_of_a_terminal_out_counts(part: str) -> None:
    grammar = 'start: T\nA: "a"\nE: ""\nT: ' + f"{part} " * 1001
    with pytest.raises(GrammarError, match=f"a regex may have {MAX_PARTS} parts"):
        check_regexes(grammar)


@pytest.mark.parametrize(
    "options",
    ['| "a"', '// none\n | "a"', '"a" |', '"a" | // none', '"a" |\n\nB: "b"', '"a" |\n%ignore " "', '"a" |\n?b.1: "b"'],
)
def test_an_empty_first_or_last_alternative_of_a_terminal_counts(options: str) -> None:
    with pytest.raises(GrammarError, match=f"a regex may have {MAX_PARTS} parts"):
        check_regexes(f"start: T\nT: {'A ' * 1001}\nA: {options}\n")


def test_parts_that_are_characters_are_not_counted() -> None:
    Grammars.of_bytes(262, 256).compile(of_pattern("^" + r"\\?[?*](?:a)" * 600 + "$"))


def test_alternatives_of_a_terminal_that_are_not_empty_are_not_counted() -> None:
    check_regexes("start: T\nT: " + "\n | ".join(f'"{number}" ("a" | "b")' for number in range(2000)))
    check_regexes("start: T\nT: " + " |\n ".join(f'"{number}"' for number in range(2000)))
