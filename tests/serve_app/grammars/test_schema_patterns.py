"""Owns the contract of a schema's patterns: a class admits what ECMAScript says, and no quote that it excludes.
Never tests what llguidance refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from serve_app.api.generation.tool_grammars import can_be_kept
from serve_app.grammars import texts
from serve_app.grammars.allowance import Allowance
from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.regex_tree import read_regex
from serve_app.grammars.schema_patterns import kept_pattern
from serve_app.grammars.tool_texts import lark_text, regex_text
from tests.support.grammar_walks import Walker

WALKER = Walker()
CASES = [
    (r'^[^"]*$', ["a", "\\", "\n", "é", "\x02"], ['"', 'a"b']),
    (r"^[^\\]*$", ["a", '"', "\n"], ["\\", "a\\b"]),
    (r'^[^"\\]+$', ["a", "\t"], ['"', "\\", 'a"b']),
    (r'^[^"\\\n]*$', ["a", "\t"], ['"', "\\", "\n"]),
    (r'^[^<>:"/\\|?*]+$', ["a", "é b"], ['"', "\\", "a/b"]),
    (r"^[^\x22\u005c]*$", ["a"], ['"', "\\"]),
    (r'[^"]', ["a", 'a"'], ['"', '""']),
    (r'^(?:[^"\n]|\n)*$', ["a\n"], ['"']),
    (r'^(?:[^"\x00-\x1f]|[\x00-\x1f])*$', ["a", "\n"], ['"']),
    (r'^(?:[^"]|\x01)*$', ["a", "\n"], ['"']),
    (r"^[\x00-\x1f]*$", ["\n", "\x02"], ['"', "\\", "a"]),
    (r"^\P{P}*$", ["a", "\n"], ['"', "\\"]),
    (r"^[^\p{P}]*$", ["a", "\n"], ['"', "\\"]),
    (r"^\p{Cc}*$", ["\n"], ['"', "\\", "a"]),
    (r"^[^a]*$", ["b", '"', "\\", "\n", "\x01"], ["a"]),
    (r"^[+--/]+$", ["+", ",", "-", "/"], [".", "*"]),
    (r"^[--/]+$", ["-", ".", "/"], [",", "0"]),
    (r"^[a&&b]+$", ["a", "b", "&"], ["c"]),
    (r"^[a~~b]+$", ["a", "b", "~"], ["c"]),
    (r"^[[a]+$", ["[", "a"], ["]"]),
    (r"^[\w-.]+$", ["a-b", ".", "9_"], ["/", "+"]),
    (r"^[^a-z[\]&&-]+$", ["A", '"'], ["[", "]", "&", "-", "b"]),
    (r"^[]a]+$", ["]", "a"], ["["]),
    (r"^\[[^\]]*\]$", ["[]", '[a"]'], ["[", "[]]"]),
]


def grammar(pattern: str, **more: Any) -> str:
    text = json_schema({"type": "string", "pattern": pattern} | more).text()
    assert not find_fault(text)
    return text


def admitted(text: str, values: list[str]) -> list[str]:
    return [value for value in values if WALKER.admits(text, json.dumps(value, ensure_ascii=False))]


@pytest.mark.parametrize(("pattern", "inside", "outside"), CASES)
def test_a_class_admits_what_it_says_and_no_quote_or_backslash_that_it_excludes(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    r"""`[^"]` admitted `\"`: a set with every control character was taken for one with the quote and the backslash."""
    text = grammar(pattern)
    assert admitted(text, inside) == inside
    assert admitted(text, outside) == []


def test_the_names_of_further_keys_are_matched_the_same_way() -> None:
    schema = {"type": "object", "patternProperties": {'^[^"]+$': {"type": "integer"}}, "additionalProperties": False}
    text = json_schema(schema).text()
    assert WALKER.admits(text, '{"a": 1}')
    assert not WALKER.admits(text, '{"a\\"": 1}')


def test_two_patterns_of_further_keys_that_become_one_are_both_told() -> None:
    schema = {"type": "object", "patternProperties": {"^[&]$": {"type": "integer"}, r"^[\&]$": {"type": "string"}}}
    assert "not disjoint" in find_fault(json_schema(schema).text())


@pytest.mark.parametrize(
    "escape", [r"\x{110000}", r"\u{FFFFFFFF}", r"\U{FFFFFFFFFFFFFFFFF}", r"\UFFFFFFFF", r"\x{d800}", r"\x{}"]
)
def test_a_class_with_a_code_that_no_character_has_is_a_fault_of_the_schema(escape: str) -> None:
    """Such a pattern was answered by a 500."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^[{escape}]$"}}}
    assert find_fault(json_schema(schema).text())
    assert not can_be_kept("f", schema, "hermes")


def test_a_regex_with_a_code_or_a_count_that_is_out_of_range_is_refused_by_name() -> None:
    for part in (r"\x{110000}", r"\u{FFFFFFFF}", "{" + "9" * 5000 + "}", "{1," + "9" * 5000 + "}"):
        with pytest.raises(GrammarRefused, match=f"a regex's {re.escape(repr(part[:20]))} is not supported"):
            read_regex(f"a{part}", Allowance())


def test_a_schema_without_such_a_class_is_written_as_it_is() -> None:
    for pattern in (r"^[a-z]+$", r"^\d{3}-[^a]\.\[.*\p{L}$", "^[", "\\", r"^[a\]"):
        assert kept_pattern(pattern) == pattern


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (lark_text('start: "SELECT " /[^"]+/'), ["SELECT a"], ['SELECT "', 'SELECT a"']),
        (regex_text(r'C:\\[^\\/:*?"<>|]+'), ["C:\\a b"], ["C:\\a\\b", 'C:\\"']),
        (regex_text(r"[a-z&&[^b-y]]+[[:digit:]][+--/]"), ["az9+"], ["b9+", "a9-", "a&9+"]),
        (regex_text(r"[[^\x22]&&[^a]]+"), ["b"], ['"', "a"]),
    ],
    ids=str,
)
def test_a_custom_tools_regex_stays_rusts_and_excludes_quotes_too(
    text: Any, inside: list[str], outside: list[str]
) -> None:
    written = grammar(text.pattern)
    assert admitted(written, inside) == inside
    assert admitted(written, outside) == []


def test_a_pattern_inside_a_clients_lark_is_matched_the_same_way() -> None:
    text = texts.grammar(r'start: "<" %json {"type": "string", "pattern": "^[^\"]*$"} ">"').text()
    assert WALKER.admits(text, '<"a\\\\">')
    assert not WALKER.admits(text, '<"a\\"">')


@pytest.mark.parametrize("pattern", [r"^\x1b$", r"^\u001b+$", "^\x1b[\x00-\x07]$", r"^[\x0e-\x1f]$"])
def test_a_pattern_that_only_codes_could_write_is_refused_where_they_could_write_a_key_twice(pattern: str) -> None:
    """Such an answer ended behind the quote."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    assert "required property 'a' is unsatisfiable" in find_fault(json_schema(schema).text())
    assert not find_fault(json_schema(schema | {"additionalProperties": False}).text())
    either = schema | {"properties": {"a": {"type": "string", "pattern": f"{pattern}|^b$"}}}
    assert WALKER.walk(json_schema(either).text(), 1).startswith('{"a": "b"')
