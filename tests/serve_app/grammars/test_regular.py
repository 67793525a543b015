"""Owns the contract of grammars inside other text: the regex has the language of the Lark, or the Lark is refused.
Never trusts the translation: llguidance's own reading of the Lark, and a patch parser, decide what is in it."""

from __future__ import annotations

import json
import random
import tracemalloc
from contextlib import suppress

import pytest

from serve_app.grammars.encodings import JSON_STRING
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.lark_rules import read_lark
from serve_app.grammars.nested import nested_rules
from serve_app.grammars.notation import GrammarRefused, lark
from serve_app.grammars.regular import MAX_NESTED, MAX_NESTED_RULES, lark_pattern, of_whole, regex_pattern
from tests.support import patches
from tests.support.grammar_walks import Walker

WALKER = Walker()
ARITHMETIC = """start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)*
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
DOUBLED = "start: a0 \n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(20)) + 'a20: "x"\n'
REPEATED = f'start: {"a " * 16_000}\na: "{"x" * 24_000}"\n'
"""56 kB, which would expand to 384 MB."""
NESTED = "start: a0\n" + "".join(f'a{i}: ["y" ["z" a{i + 1}]]\n' for i in range(60)) + 'a60: "x"\n'
CHAIN = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(80)) + 'a80: "x"\n'


def pattern_of(definition: str) -> str:
    return lark_pattern(read_lark(definition))


def inside(pattern: str) -> str:
    return json_schema({"type": "string", "pattern": pattern}).text()


def admits(pattern: str, text: str) -> bool:
    return WALKER.admits(inside(pattern), json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("definition", "taken", "others"),
    [
        (ARITHMETIC, ["1", "1 + 23 * 4"], ["", "1+2", "1 + ", "1 + 2\n"]),
        ('start: "a"~2..3 ["c"] "x".."z"', ["aay", "aaacz"], ["ay", "aac", "aacw", "aaaay"]),
        ('start: "a"{2} ("b" | "cd")+', ["aab", "aacdb"], ["ab", "aa", "aac"]),
        ('start: item*\nitem: "a" item | "b"', ["", "b", "aab", "aabb"], ["a", "ba"]),
        ('start: list\nlist: list "," INT | INT\n%import common.INT', ["1", "1,22"], ["", "1,", ",1"]),
        ('start: items\nitems: "x" items?', ["x", "xxx"], ["", "xy"]),
        ("start: WORD (WS WORD)*\n%import common (WORD, WS)", ["ab", "ab \n cd"], ["", "a1", "ab "]),
        ('start: "say"i /"[^"\\/]*"/', ['say"x"', 'SaY"\\"'], ['say"a/b"', "say"]),
        ("?start: A _b\nA: /a.b/s\n!_b: /\\d{2}/ // two", ["a\nb12", "axb12"], ["ab12", "axb1", "axb٣٣"]),
        ('start: "\\u0041\\x42\\n\\"\\\\"', ['AB\n"\\'], ["AB"]),
        ('start: | "x"', ["", "x"], ["xx"]),
        (r'start: "\\x41"', [r"\x41"], ["A", r"\A", r"\u0041"]),
        (r'start: "\\\x41\\u0042\\\\x43"', [r"\A\u0042\\x43"], [r"\\x41B\C", r"\AB\C"]),
    ],
    ids=str,
)
def test_the_regex_and_the_rules_take_what_the_grammar_describes_and_nothing_else(
    definition: str, taken: list[str], others: list[str]
) -> None:
    pattern, raw = pattern_of(definition), lark(definition).text()
    assert [text for text in taken if not WALKER.admits(raw, text)] == []
    # In the regex, `\d` is ASCII.
    assert [text for text in others if text.isascii() and WALKER.admits(raw, text)] == []
    assert [text for text in taken if not admits(pattern, text)] == []
    assert [text for text in others if admits(pattern, text)] == []
    nested = lark(f'start: "\\"" {nested_rules(read_lark(definition), JSON_STRING)} "\\""').text()
    assert [text for text in taken if not WALKER.admits(nested, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in others if WALKER.admits(nested, json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize(
    ("definition", "told"),
    [
        ('start: "(" start ")" | "x"', "the rule 'start' refers to itself"),
        ('start: a\na: b "x" | "y"\nb: a "z" | "w"', "refers to itself"),
        ('start: x "b"\nx: "a" x | x "c" | "d"', "the rule 'x' refers to itself"),
        ('start: start "x"', "the rule 'start' never ends"),
        ('start: "x" start', "the rule 'start' never ends"),
        ("start: /^a/", "'^'"),
        (r"start: /a\z/", r"\z"),
        ("start: A\nA: /a+/ & ~/aaa/", "'& ~/aaa/'"),
        ('start: %json {"type": "string"}', "%json"),
        ("start: <|tool|>", "<|tool|>"),
        ("start: x\nx[lazy]: /a/", "[lazy]"),
        ("start: /a b/x", "'x'"),
        ("%import common.SQL_COMMENT\nstart: SQL_COMMENT", "SQL_COMMENT"),
        ('start: "a" "b"\n%ignore " "', "%ignore"),
        ("start: a", "a"),
        ("begin: /a/", "start"),
        (DOUBLED, "at most 24576 characters"),
        (REPEATED, "at most 24576 characters"),
        (NESTED, f"at most {MAX_NESTED} deep"),
        (CHAIN, f"at most {MAX_NESTED_RULES} deep"),
        ("start: " + "(" * 40 + '"x"' + ")" * 40, "deep"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_regular_language_or_says_more_than_one_is_refused_with_the_reason(
    definition: str, told: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        pattern_of(definition)
    assert told in refused.value.text


def test_a_regex_is_written_no_further_than_its_limit() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(GrammarRefused):
            pattern_of(REPEATED)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_whatever_a_client_sends_is_read_or_refused() -> None:
    rng, read = random.Random(0), 0
    parts = [
        *patches.GRAMMAR.split(" "),
        "\n",
        '"',
        "/",
        "(",
        ")",
        "[",
        "|",
        "?",
        "*",
        "~2",
        "{3}",
        "..",
        "->",
        ":",
        "é",
    ]
    for _ in range(300):
        text = patches.GRAMMAR.split(" ")
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(len(text))] = rng.choice(parts) * rng.choice((1, 1, 2, 2000))
        with suppress(GrammarRefused):
            read += bool(pattern_of(" ".join(text)))
    assert read


def test_a_regex_is_of_the_whole_text() -> None:
    pattern = regex_pattern("a|b+/")
    assert [text for text in ("a", "bb/", "ab/", "xa", "b") if admits(pattern, text)] == ["a", "bb/"]
    with pytest.raises(GrammarRefused):
        regex_pattern("(")


@pytest.mark.parametrize("pattern", ["a", "^a$", "^(?:a)|(?:b)$", "^(?:a", "(?:a)$"])
def test_only_a_pattern_of_the_whole_text_is_taken_for_one(pattern: str) -> None:
    assert of_whole(pattern) is None
    assert of_whole(regex_pattern("a|(b)")) == "a|(b)"


def test_the_reader_of_patches_agrees_with_the_grammar() -> None:
    """Check the judge of the walks against another reading of the same grammar."""
    rng, raw = random.Random(0), lark(patches.GRAMMAR).text()
    for _ in range(100):
        text = patches.draw(rng)
        place = rng.randrange(len(text))
        for one in (text, text[:place] + rng.choice("\n*@x") + text[place + 1 :], text[:place]):
            assert patches.is_patch(one) == WALKER.admits(raw, one), one
