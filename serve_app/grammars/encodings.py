"""Owns how a text is written inside a call: escaped in a JSON string, or verbatim up to a tag.
Never knows which model family writes which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from serve_app.grammars.notation import escaped


@dataclass(frozen=True, slots=True)
class Encoding:
    """`units`: characters that are lexemes of their own, each with the regex of its written form; every other character
    is written as it is. `end`: a text that must not occur inside; its first character is a unit, its others are not.

    A lexer that looks one byte ahead can then tell where a lexeme ends, whatever follows it.
    """

    units: Mapping[str, str]
    end: str = ""

    def __post_init__(self) -> None:
        assert not self.end or [character in self.units for character in self.end] == [True] + [False] * (
            len(self.end) - 1
        )


_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": r"\\"}


def _escape(character: str) -> str:
    if character in _SHORT:
        return rf"\\{_SHORT[character]}"
    code = f"{ord(character):02x}"
    return r"\\u00" + "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in code)


JSON_STRING = Encoding(
    MappingProxyType({character: _escape(character) for character in (*map(chr, range(0x20)), '"', "\\")})
)
"""The text between the quotes, with the escapes that `json.dumps` writes."""


def as_it_is(end: str, frame: str) -> Encoding:
    """Return the encoding of verbatim text up to the tag `end`, with `frame` before it."""
    return Encoding({character: escaped(character) for character in {*frame, end[0]}}, end)
