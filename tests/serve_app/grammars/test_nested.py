"""Owns the contract of nested grammars inside a JSON string: they take what the Lark describes, or are refused.
Never trusts the translation: Python's `re` says what a terminal matches."""

from __future__ import annotations

import json
import random
import re
import sys
from contextlib import suppress

import pytest

from serve_app.grammars import nested
from serve_app.grammars.allowance import MAX_STEPS, Allowance
from serve_app.grammars.character_sets import in_both_cases, of_category
from serve_app.grammars.encodings import JSON_STRING, Encoding, as_it_is
from serve_app.grammars.lark_rules import read_lark
from serve_app.grammars.nested import nested_rules
from serve_app.grammars.notation import GrammarRefused, lark
from serve_app.grammars.texts import MAX_LARK_DEPTH, grammar
from serve_app.grammars.tool_texts import lark_text
from tests.support.grammar_walks import Walker

WALKER = Walker(closers=('x"', '\\"', '"'))
MAX_EVENTS = 2_000_000
NESTS = 'start: "(" start ")" | A\n'


def inside(definition: str) -> str:
    rules = nested_rules(read_lark(definition), JSON_STRING)
    return lark(f'start: "\\"" {rules} "\\""').text()


def admits(rules: str, text: str) -> bool:
    return WALKER.admits(rules, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        '[^"]*x',
        '(ab"?)*',
        r'a{2,4}"b?',
        r'(a|ab)(c|bcd)*"',
        r'"([^"\\]|\\.)*"',
        r"[\x00-\x1fa]+b?",
        r"(\n|\r\n?)*a",
        r"[^a\t]{0,9}",
        r"(?i:[^k\n]|s\\)+",
        r"(?s:.){2}",
        r"\W\S\D",
        r'(|a"|"b"|ab)+',
        r'("a)?("b)?(ab?){2}',
    ],
)
def test_a_terminal_takes_what_its_regex_does(pattern: str) -> None:
    rules, rng = inside(f"start: A\nA: /{pattern}/"), random.Random(pattern)
    for _ in range(200):
        text = "".join(rng.choice('aabbcx"\\\n\r\t\x00kKsé') for _ in range(rng.randint(0, 6)))
        assert admits(rules, text) is (re.fullmatch(pattern, text, re.ASCII) is not None), text
    for seed in range(10):
        text = json.loads(WALKER.walk(rules, seed))
        assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("character", [*map(chr, range(0x20)), '"', "\\", "\x7f", "\u2028", "🦜"])
def test_each_character_is_written_as_json_has_it(character: str) -> None:
    rules = inside(f"{NESTS}A: /[^a]/")
    assert admits(rules, character)
    assert admits(rules, f"(({character}))")
    assert not admits(rules, f"({character}")
    assert not admits(inside(f"{NESTS}A: /[^\\x{{{ord(character):x}}}]/"), character)


@pytest.mark.parametrize(
    ("definition", "taken", "others"),
    [
        ('start: "a" start "b" | "\\n"', ["\n", "a\nb", "aa\nbb"], ["", "a\n", "ab"]),
        ('start: a\na: b "x" | "y"\nb: a "z" | "w"', ["y", "wx", "yzx"], ["yz", "w"]),
        ('start: start "x" | "y"\n%ignore " "', ["y", " y x", "yxx "], ["", "x", "y\n"]),
        (NESTS + 'A: "a" "b"\n%ignore /\\s/', ["ab", "( ab\n)\t"], ["a b", "(ab"]),
        (
            NESTS + "A: /a/\n%ignore /#.*\\n/ // to the end\n%ignore WS\n%import common.WS",
            ["(#)\n a)"],
            ["(#)", "(# a)"],
        ),
        (NESTS + 'A: "\\""i | "É"i', ['(")', "((é))", "É"], ["E", "((É"]),
        (NESTS + r"A: /[\p{Lu}\p{Nd}]\pZ/", ["(É\u00a0)", "1 "], ["é ", "(1"]),
        ('start: a*\na: START start END\nSTART: "{"\nEND: "}"', ["", "{}{{}{}}"], ["}", "{{}"]),
        ('start: [x] ["y" start]{0,2}\nx: "x" # text', ["", "xy", "yxyx"], ["xx", "z"]),
    ],
    ids=str,
)
def test_rules_take_what_the_grammar_describes_and_nothing_else(
    definition: str, taken: list[str], others: list[str]
) -> None:
    text = lark_text(definition)
    assert text.nested is not None
    rules = inside(definition)
    assert [one for one in taken if not admits(rules, one)] == []
    assert [one for one in others if admits(rules, one)] == []


MANY = (
    NESTS
    + "A: B\n"
    + "".join(f'B{i}: /x{i}"[^z]*y/\n' for i in range(600))
    + "B: "
    + " | ".join(f"B{i}" for i in range(600))
)


@pytest.mark.parametrize(
    ("definition", "told"),
    [
        ('start: start "x"', "line 1: the rule 'start' never ends"),
        ('start: "x"\n | b\nb: "x" c\nc: "y" b', "the rule 'c' never ends"),
        (NESTS + "\nA: /a*?b/", "line 3: the terminal 'A': a regex has the lazy '*?'"),
        (NESTS + 'A: /[a&&b"]/', "line 2: the terminal 'A': a regex's '&&' inside a class"),
        (NESTS + r"A: /\p{Greek}/", r"line 2: the terminal 'A': a regex's '\\p{Greek}'"),
        (NESTS + "A: /(?x)a/", "line 2: the terminal 'A': a regex's flag 'x'"),
        (NESTS + 'A: /("[^a]){2000}/', "line 1: the rule 'start': terminals that can match quotes or escapes"),
        (NESTS + "A: /[^\\n]{0,80}/", "ways between quotes and escapes"),
        (NESTS + "A: /(?=a)b/", "line 2, column 4: invalid regex"),
        (NESTS + 'A: "x" A', 'circular reference in token "A"'),
        (NESTS + "A: /a/\n%ignore /b*?/", "%ignore: a regex has the lazy"),
        (NESTS + "A: /a/ & ~/b/", "line 2: '& ~/b/' is not supported here"),
        (NESTS + "A[lazy]: /a/", "line 2"),
        (NESTS + 'A: "x"\n%import common.SQL_COMMENT', "line 3: imports common.SQL_COMMENT"),
        (MANY, "at most"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_kept_is_refused_by_the_name_of_its_rule(definition: str, told: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        lark_text(definition)
    assert told in refused.value.text


def chain(num_rules: int, brackets: int) -> str:
    ways = f'{"(" * brackets}a{{}} "<"{")" * brackets} | "x"'
    rules = "".join(f"a{number}: {ways.format(number + 1)}\n" for number in range(num_rules))
    return f'start: a0\n{rules}a{num_rules}: "y"\n'


@pytest.mark.parametrize(("num_rules", "brackets"), [(2500, 0), (500, 25)])
@pytest.mark.parametrize("read", [grammar, lark_text])
def test_rules_that_would_end_the_process_are_refused(num_rules: int, brackets: int, read: type) -> None:
    """llguidance recurses from rule to rule until its stack overflows."""
    with pytest.raises(GrammarRefused, match=f"at most {MAX_LARK_DEPTH} rules and brackets"):
        read(chain(num_rules, brackets))
    read(chain(300, 2))


CASELESS = "(?i:" + "".join(f"[^{chr(0x4E00 + number)}]" for number in range(100)) + ")"


@pytest.mark.parametrize(
    "terminal",
    [
        f"({'|'.join(f'a{number}{chr(34)}b' for number in range(120))})*",
        f"({'|'.join(f'a{number}{chr(34)}b' for number in range(300))})*",
        "a?" * 1000 + '"',
        '[a"]?' * 300,
        "(a|b)*" * 100 + '"' + "(a|b)*" * 100,
        "(" * 60 + "a" + "+)" * 60,
        r"[^\p{L}]" * 300,
        CASELESS,
    ],
    ids=lambda terminal: f"{terminal[:20]} {len(terminal)}",
)
@pytest.mark.parametrize("encoding", [JSON_STRING, as_it_is("</parameter>", "\n")], ids=["json", "tag"])
def test_a_translation_is_bounded_work(terminal: str, encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted, not timed: a step takes about half a microsecond."""
    grammar, allowances = read_lark(f"{NESTS}A: /{terminal}/\n"), list[Allowance]()

    def allowed() -> Allowance:
        allowances.append(Allowance())
        return allowances[-1]

    monkeypatch.setattr(nested, "Allowance", allowed)
    in_both_cases(of_category("L"))  # makes tables, once per process
    num_events = 0

    def count(*event: object) -> None:
        nonlocal num_events
        num_events += 1

    sys.setprofile(count)
    try:
        with suppress(GrammarRefused):
            nested_rules(grammar, encoding)
    finally:
        sys.setprofile(None)
    assert num_events < MAX_EVENTS, "calls, a measure of work that no other process changes"
    assert [one.num_steps < MAX_STEPS for one in allowances] == [True], "all that is translated is counted"


def test_a_refusal_of_too_much_work_names_the_rule_and_the_limit() -> None:
    terminal = "|".join(f'a{number}"b' for number in range(120))
    with pytest.raises(GrammarRefused, match=f"line 1: the rule 'start': .* at most {MAX_STEPS} steps"):
        nested_rules(read_lark(f"{NESTS}A: /({terminal})*/\n"), JSON_STRING)


def test_characters_without_case_are_looked_up_and_not_searched_for() -> None:
    rules = inside(f'{NESTS}A: "{"Kelvin" * 300}"i\n')
    assert admits(rules, "\u212aELVIN" * 300)  # the sign of the unit
    assert not admits(rules, "CELVIN" * 300)
