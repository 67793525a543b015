"""Owns the patterns of a JSON schema: character classes that llguidance reads as ECMAScript does, and quotes exactly.
Never interprets a pattern beyond its classes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache

from serve_app.grammars.allowance import Allowance
from serve_app.grammars.character_sets import has
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.regex_tree import Characters, Row, read_regex

OF_RUST = "^(?u:"
"""Begins a pattern that is Rust's already. ECMAScript has no such flag, and Rust has it on."""

_SPARE = r"\x01"
"""A character that no text has. llguidance 1.9.1 takes a set with all control characters for one that has the quote and
the backslash, too."""
_PARTS = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,8})\}|(?P<category>[pP](?:\{[^}]*\}|\w))|[\s\S])"
    r"|(?P<class>\[)|[\x00-\x1f\x7f]"
)
_MEMBER = re.compile(r"\\(?:[pP]\{[^}]*\}|[xu]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[\s\S])|[^\\]")
_SET = re.compile(r"\\[dDwWsSpP]")
_PRINTED = re.compile(r"\\p\{?[LMNPSZ]")
"""Categories without control characters."""
_OPERATORS = "[&~-"

CODES = r"\x00-\x07\x0b\x0e-\x1f\x7f"
"""Characters that JSON can only write as codes."""
_CODED = re.compile(f"[{CODES}]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]|\\(?:x[017]|u00[017]|[xu]\{|[av])")
_NOTHING = rf"[{_SPARE}--{_SPARE}]"
"""A class without a character."""


@lru_cache(1024)
def kept_pattern(pattern: str) -> str:
    """Write a schema's pattern for llguidance, which reads Rust's syntax. Where a class excludes the quote or the
    backslash, it excludes U+0001, too."""
    is_of_rust = pattern.startswith(OF_RUST)

    def kept(part: re.Match[str], text: str) -> str:
        if part["class"]:
            return _quotable(text if is_of_rust else _plain(text))
        if part["category"]:
            return text if _PRINTED.match(text) else f"[{text}--{_SPARE}]"
        return _NOTHING if _character(part) == "\x01" else text  # a choice of both would have it again

    return _replaced(pattern, kept, can_nest=is_of_rust)


@lru_cache(1024)
def uncoded_pattern(pattern: str) -> str:
    """Take out of a kept pattern what JSON writes as codes such as U+001B, for where codes are not allowed. llguidance
    1.9.1 leaves it out of a row of characters and admits the others."""

    def uncoded(part: re.Match[str], text: str) -> str:
        if part["class"]:
            return f"[{text}--{CODES}]" if _CONTROLS.search(text) else text
        return _NOTHING if _CODED.fullmatch(_character(part)) else text

    return _replaced(pattern, uncoded, can_nest=True)


def _character(part: re.Match[str]) -> str:
    digits = next(filter(None, part.groups()[:3]), None)
    if digits is None:
        return {r"\a": "\a", r"\v": "\v"}.get(part[0], part[0])
    return chr(code) if (code := int(digits, 16)) <= sys.maxunicode else part[0]


def _replaced(pattern: str, write: Callable[[re.Match[str], str], str], *, can_nest: bool) -> str:
    """Replace the classes and escapes of a pattern."""
    written, place = list[str](), 0
    while (part := _PARTS.search(pattern, place)) is not None:
        end = _class_end(pattern, part.end(), can_nest=can_nest) if part["class"] else part.end()
        if end is None:  # it is not closed, which llguidance reports
            return pattern
        written += (pattern[place : part.start()], write(part, pattern[part.start() : end]))
        place = end
    return "".join((*written, pattern[place:]))


def _class_end(pattern: str, place: int, *, can_nest: bool) -> int | None:
    """Return the place behind the class that begins before `place`; None if there is no end. A bracket at its beginning
    is a character."""
    depth, is_first = 1, True
    while depth:
        if is_first and pattern.startswith("^", place):
            place += 1
        member = _MEMBER.match(pattern, place)
        if member is None:
            return None
        place = member.end()
        opens = can_nest and member[0] == "["
        depth += opens - (member[0] == "]" and not is_first)
        is_first = opens
    return place


def _plain(text: str) -> str:
    """Escape what is an operator or a class inside a class in Rust, and a character in ECMAScript."""
    begin = 2 if text.startswith("[^") else 1
    members = _MEMBER.findall(text, begin, len(text) - 1)
    written, place = [text[:begin]], 0
    while place < len(members):
        ends = members[place : place + 3]
        if len(ends) == 3 and ends[1] == "-" and not (_SET.match(ends[0]) or _SET.match(ends[2])):
            written.append(f"{_escaped(ends[0])}-{_escaped(ends[2])}")
            place += 3
        else:
            written.append(_escaped(ends[0]))
            place += 1
    return "".join((*written, "]"))


def _escaped(member: str) -> str:
    return f"\\{member}" if member in _OPERATORS else member


def _quotable(text: str) -> str:
    """Take U+0001 out of a class without a quote or a backslash, or one that is not understood."""
    if not re.search(r"\\[pP]", text):  # their reader takes long at first
        try:
            tree = read_regex(text, Allowance())
        except GrammarRefused:
            tree = None
        match tree:
            case Row((Characters(found),)) if not has(found, "\x01") or (has(found, '"') and has(found, "\\")):
                return text
    return f"[{text}--{_SPARE}]"
