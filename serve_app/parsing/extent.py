"""Finds the end of a bracketed JSON or Python text that arrives in pieces; brackets in strings do not count.
Never checks the text inside: neither whether brackets match, nor the grammar between them."""

from __future__ import annotations

import re
from typing import Literal

_PATTERNS = {
    "json": re.compile(r'["{}\[\]]'),
    "python": re.compile(r"""["'(){}\[\]]"""),
}
_OPENING = frozenset("({[")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class Extent:
    """Tracks one text, which begins with an opening bracket or a quote. `done` after the one that closes it."""

    def __init__(self, language: Literal["json", "python"]) -> None:
        self._structure = _PATTERNS[language]
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.done = False

    def find_end(self, piece: str, at: int) -> int:
        """Return the index after the last character of `piece` that belongs to the text."""
        while at < len(piece) and not self.done:
            at = self._in_string(piece, at) if self._quote else self._between_strings(piece, at)
        return at

    def _between_strings(self, piece: str, at: int) -> int:
        match = self._structure.search(piece, at)
        if match is None:
            return len(piece)
        if match[0] in _IN_STRING:
            self._quote = match[0]
        else:
            self._depth += 1 if match[0] in _OPENING else -1
            self.done = self._depth == 0
        return match.end()

    def _in_string(self, piece: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _IN_STRING[self._quote].search(piece, at)
        if match is None:
            return len(piece)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
            self.done = self._depth == 0
        return match.end()
