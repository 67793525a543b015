"""Owns the grammars that a client writes: a regex, a list of texts, Lark, or GBNF.
Never drops a part of one; what llguidance's notation lacks is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from serve_app.grammars.check import find_fault
from serve_app.grammars.lark_rules import read_lark
from serve_app.grammars.lark_schemas import with_kept_schemas
from serve_app.grammars.notation import Grammar, GrammarRefused, lark, quoted
from serve_app.grammars.regexes import MAX_BYTES as MAX_BYTES
from serve_app.grammars.regexes import check_size
from serve_app.grammars.regexes import regex as regex
from serve_app.grammars.regular import Expansion

MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1000
MAX_GBNF_BYTES = 32 * 2**10
MAX_GBNF_RULES = 256
"""The converter looks at every rule again for each rule that turns out to be a terminal."""
_MAX_DEPTH = 32
MAX_LARK_DEPTH = 1024
"""Limits the depth of all rules of a Lark grammar together, as if each were inside the brackets of the one before.
llguidance recurses from rule to rule, and a stack overflow ends the process."""

_OF_CONVERTER = "%llguidance {}\n"
_STARTS_LARK = re.compile(r"^[ \t]*[?!]*start[ \t]*(?:\.-?\d+|\{[^}\n]*\}|\[[^\]\n]*\])?[ \t]*:(?!:=)", re.MULTILINE)
"""The first rule with marks for a parser's tree, as in Lark's own examples and in Outlines', or with a priority,
parameters or attributes. llguidance's test of what is Lark knows none of them; its reader does, and names what it
lacks."""
_LARK_RULE = re.compile(r"^[ \t]*[?!]*[A-Za-z_][^\n]*?:", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[\s\S])")
_TEMPERATURE = re.compile(r"^[ \t]*[\w?!.]+\[[^\]\n]*\btemperature\b", re.MULTILINE)


def choice(texts: Sequence[str]) -> Grammar:
    """Constrain the answer to one of these texts.

    Raises:
        GrammarRefused: they are too long.
    """
    check_size("".join(texts))
    return lark("start: " + " | ".join(quoted(text) for text in dict.fromkeys(texts)))


def grammar(text: str) -> Grammar:
    """Read Lark as llguidance knows it, or GBNF.

    Raises:
        GrammarRefused: it is too long, or neither.
    """
    check_size(text)
    if not (is_lark_syntax(text) or _STARTS_LARK.search(text)):
        return _of_characters(with_kept_schemas(_lark_of(text)))
    if _TEMPERATURE.search(text):
        raise GrammarRefused("a rule's temperature is not supported")
    check_lark_depth(text)
    return lark(with_kept_schemas(text))


def _of_characters(rules: str) -> Grammar:
    """Make the grammar of rules that came from GBNF, which reads characters, while Lark reads lexemes that take as much
    as they can. One regex reads characters, too, so the grammar becomes one if it is regular and not too large."""
    with suppress(GrammarRefused):
        found = regex(Expansion(read_lark(rules.removeprefix(_OF_CONVERTER))).regex("start"))
        if not find_fault(found.text()):
            return found
    return lark(rules)


def check_lark_depth(text: str) -> None:
    """
    Raises:
        GrammarRefused: its rules may be nested too deep.
    """
    begins = [match.start() for match in _LARK_RULE.finditer(text)]
    rules = [text[begin:end] for begin, end in pairwise([*begins, len(text)])]
    if (depth := sum(1 + _depth(rule, "([", ")]") for rule in rules)) > MAX_LARK_DEPTH:
        told = f"should have at most {MAX_LARK_DEPTH} rules and brackets inside one another"
        raise GrammarRefused(f"{told}, but all of its rules together could have {depth}")


def _lark_of(gbnf: str) -> str:
    check_size(gbnf, MAX_GBNF_BYTES)
    names = _GBNF_RULE.findall(gbnf)
    if not names:
        raise GrammarRefused("should be a grammar in Lark with a rule `start: ...`, or in GBNF with `root ::= ...`")
    if len(names) > MAX_GBNF_RULES:
        raise GrammarRefused(f"should have at most {MAX_GBNF_RULES} rules in GBNF, but it has {len(names)}")
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise GrammarRefused(f"has the rule {twice[:50]!r} twice")
    if _depth(gbnf) > _MAX_DEPTH:
        raise GrammarRefused(f"should be nested at most {_MAX_DEPTH} deep, but it is deeper")
    try:
        return any_to_lark(_GBNF_ESCAPE.sub(_plain_escape, gbnf))
    except Exception as error:
        raise GrammarRefused(f"is no GBNF that can be read: {error}") from error


def _plain_escape(match: re.Match[str]) -> str:
    r"""Rewrite `\u0041`. The converter strips the zeros, and Lark does not know `\u41`; it leaves `\x41` alone."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarRefused(f"the escape {match[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _depth(text: str, opening: str = "(", closing: str = ")") -> int:
    """Return how deep brackets nest. Those in strings and character classes count too, which errs on the safe side."""
    depth = deepest = 0
    for character in text:
        depth += (character in opening) - (character in closing)
        deepest = max(deepest, depth)
    return deepest
