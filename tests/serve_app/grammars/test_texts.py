"""Owns the contract of a client's own grammars: a regex, choices, Lark and GBNF admit what they say and nothing else.
Never tests how they are written."""

from __future__ import annotations

import pytest

from serve_app.grammars import texts
from serve_app.grammars.check import MAX_CHARS, find_fault
from serve_app.grammars.notation import GrammarRefused, lark, literal, quoted
from tests.support.grammar_walks import Walker

WALKER = Walker()
ARITHMETIC = """
# an expression
root ::= term ([-+*/] term)*
term ::= number | "(" root ")"
number ::= [0-9]+ ("." [0-9]{1,2})?
"""


@pytest.mark.parametrize(
    ("pattern", "text", "is_admitted"),
    [
        (r"\d{3}-\d{4}", "555-1234", True),
        (r"\d{3}-\d{4}", "555-12345", False),
        (r"\d{3}-\d{4}", "x555-1234", False),
        (r"\d", "٣", False),
        (r"[\d.]\w", ".a", True),
        (r"[\d.]\w", "٣a", False),
        (r"[\d.]\w", "1é", False),
        (r"\W\D[\]\d][]\d]", "é.5]", True),
        (r"\W\D[\]\d][]\d]", "é.5x", False),
        (r"\\d", r"\d", True),
        (r"\\d", r"\5", False),
        ("a/b", "a/b", True),
        (r"a\/b", "a/b", True),
        ("^(yes|no)$", "no", True),
        ("a|b", "ab", False),
        ("é.", "é🦜", True),
        ("a\nb", "a\nb", True),
        ("", "", True),
    ],
)
def test_a_regex_is_of_the_whole_answer(pattern: str, text: str, is_admitted: bool) -> None:
    assert WALKER.admits(texts.regex(pattern).text(), text) is is_admitted


ODD = ["a", 'say "hi"', "back\\slash", "line\nbreak", "<eos>", "/slash/", "é🦜", " a", "a b", "\x7f"]


@pytest.mark.parametrize("text", ODD)
def test_a_choice_is_one_of_the_texts_character_for_character(text: str) -> None:
    grammar = texts.choice(ODD).text()
    assert WALKER.admits(grammar, text)
    assert not WALKER.admits(grammar, text + "x")
    assert not WALKER.admits(texts.choice(["other"]).text(), text)


@pytest.mark.parametrize(
    ("text", "is_admitted"),
    [("1+2*(3-4)", True), ("1.25", True), ("1.255", False), ("(1", False), ("", False), ("1 + 2", False)],
)
def test_gbnf_is_read(text: str, is_admitted: bool) -> None:
    assert WALKER.admits(texts.grammar(ARITHMETIC).text(), text) is is_admitted


@pytest.mark.parametrize(
    ("gbnf", "admitted", "refused"),
    [
        ('root ::= [a-z]+ "x"', ["abx", "xx", "axbx"], ["x", "ab"]),
        ('root ::= "a" "b" | "abc" "d"', ["ab", "abcd"], ["abc", "abd"]),
        ('root ::= "<" [a-z]+ ">" | "<tool>" [0-9]', ["<table>", "<tool>", "<tool>1", "<to>"], ["<tool>12"]),
        ('root ::= "if" " " id\nid ::= [a-z]+', ["if if", "if x"], ["if "]),
        ("root ::= [0-9]{2,3} [0-9]", ["123", "1234"], ["12"]),
        ('root ::= a? "ab"\na ::= "a"', ["ab", "aab"], ["aaab"]),
        ('root ::= .* "END"', ["fooEND", "ENDEND"], ["foo"]),
        ('root ::= ("a" | "ab") ("c" | "bcd")', ["ac", "abc", "abcd", "abbcd"], ["ab"]),
        (r"root ::= item+" "\n" r'item ::= "- " [^\n]+ "\n"', ["- a\n- b/c\n"], ["- a"]),
    ],
    ids=str,
)
def test_gbnf_reads_characters_and_goes_back(gbnf: str, admitted: list[str], refused: list[str]) -> None:
    """llguidance's lexemes take as much as they can: with a common beginning, answers of one alternative were lost."""
    grammar = texts.grammar(gbnf).text()
    assert [text for text in admitted if not WALKER.admits(grammar, text)] == []
    assert [text for text in refused if WALKER.admits(grammar, text)] == []


def test_gbnf_that_would_be_too_large_a_regex_is_kept_as_rules() -> None:
    doubled = "".join(f"r{place} ::= r{place + 1} r{place + 1}?\n" for place in range(12))
    grammar = texts.grammar(f'root ::= r0\n{doubled}r12 ::= "abcdefgh"').text()
    assert not find_fault(grammar)
    assert WALKER.admits(grammar, "abcdefgh" * 3)


def test_the_escapes_of_gbnf_are_the_characters_that_they_name() -> None:
    grammar = texts.grammar(r'root ::= "\u0041\u00e9\U0001F99C\x42\n\\u0041" [\u0061-\u0063]').text()
    assert WALKER.admits(grammar, "Aé🦜B\n\\u0041b")
    assert not WALKER.admits(grammar, "Aé🦜B\n\\u0041d")


@pytest.mark.parametrize(
    ("gbnf", "told"),
    [
        ("root ::= missing", "missing"),
        ('root ::= "a', "no GBNF"),
        ("word ::= [a-z]", "root"),
        ("nothing at all", "should be a grammar"),
        ('root ::= "a"\nroot ::= "b"', "'root' twice"),
        ('root ::= "\\ud800"', "no character"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested at most"),
        ("\n".join(f"r{i} ::= [a]" for i in range(300)), "at most 256 rules in GBNF, but it has 300"),
    ],
)
def test_broken_gbnf_is_told_from_what_is_wrong(gbnf: str, told: str) -> None:
    with pytest.raises(GrammarRefused, match=r"should|is no GBNF|twice|no character") as refused:
        texts.grammar(gbnf)
    assert told in refused.value.text


def test_lark_is_taken_as_it_is() -> None:
    grammar = texts.grammar('start: "a" word\nword: /[a-z]+/\n').text()
    assert WALKER.admits(grammar, "abc")
    assert not WALKER.admits(grammar, "ab1")


@pytest.mark.parametrize("marks", ["?", "!", "!?"])
def test_a_first_rule_with_marks_for_a_tree_is_larks(marks: str) -> None:
    """Regression: Outlines' grammars begin with `?start: ...`, which was taken for GBNF."""
    grammar = texts.grammar(f'{marks}start: expression\n?expression: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n').text()
    assert WALKER.admits(grammar, "1+22")
    assert not WALKER.admits(grammar, "1+")


@pytest.mark.parametrize("rule", ["start[capture]", "?start[capture]", "!start [ capture ] "])
def test_a_first_rule_with_attributes_is_larks(rule: str) -> None:
    """Regression: it was taken for GBNF, and refused as neither."""
    grammar = texts.grammar(f'{rule}: "a" word\nword: /[a-z]+/\n').text()
    assert WALKER.admits(grammar, "abc")
    assert not WALKER.admits(grammar, "ab1")


@pytest.mark.parametrize(
    ("rule", "lacks"), [("start.2", "priority"), ("?start.-1", "priority"), ("start{x}", "params")]
)
def test_what_a_first_rule_cannot_have_is_refused_as_larks(rule: str, lacks: str) -> None:
    assert lacks in find_fault(texts.grammar(f'{rule}: "a"').text())


def test_the_engines_own_notation_in_json_is_no_grammar() -> None:
    with pytest.raises(GrammarRefused, match="should be a grammar in Lark"):
        texts.grammar('{"grammars": [{"lark_grammar": "root: x"}]}')


def test_a_temperature_in_a_rule_is_refused_and_not_ignored() -> None:
    with pytest.raises(GrammarRefused, match="temperature"):
        texts.grammar("start: word\nword[temperature=0.5]: /[a-z]+/")
    assert texts.grammar('start: "x[temperature"')


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (texts.regex("(a"), "unclosed group"),
        (texts.regex("a" * 500 + "("), "unclosed group"),
        (texts.regex(r"\bword"), "lookarounds not supported"),
        (texts.grammar("start: word"), 'unknown name: "word"'),
        (texts.grammar("start: %json {"), ""),
        (lark("start: " + "(" * 5000), "nested"),
    ],
    ids=str,
)
def test_what_llguidance_does_not_take_is_told_in_one_bounded_line(grammar: object, told: str) -> None:
    fault = find_fault(grammar.text())  # type: ignore[attr-defined]
    assert fault
    assert told in fault
    assert "\n" not in fault
    assert len(fault) <= MAX_CHARS
    assert fault == find_fault(grammar.text())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("pattern", "ends"), [("a\\", True), ("\\", True), ("\\\\\\", True), ("a\\\\", False)])
def test_a_regex_that_ends_with_half_an_escape_is_refused(pattern: str, ends: bool) -> None:
    """Regression: llguidance leaves the backslash out, and answers followed another pattern."""
    if not ends:
        assert WALKER.admits(texts.regex(pattern).text(), "a\\")
        return
    with pytest.raises(GrammarRefused, match="ends with a backslash"):
        texts.regex(pattern)


@pytest.mark.parametrize("write", [texts.regex, texts.grammar, lambda text: texts.choice([text] * 2)])
def test_bytes_are_limited(write: object) -> None:
    with pytest.raises(GrammarRefused, match=f"at most {texts.MAX_BYTES} bytes, but it has"):
        write("é" * (texts.MAX_BYTES // 2 + 1))  # type: ignore[operator]


def test_special_tokens_in_a_text_are_named_by_their_ids_and_the_longest_wins() -> None:
    specials = {"<a>": 7, "<a><b>": 8}
    assert literal("x<a>y<a><b>", specials) == '"x" <[7]> "y" <[8]>'
    assert literal('"', specials) == quoted('"')
