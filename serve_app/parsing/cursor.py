"""Reads a text that arrives in pieces: grammars are coroutines that read it, and wait at the end of a piece.
Never goes back by more than a tag, so the work is linear in the text however it was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of a grammar. It yields when it needs another piece, and returns what it read."""

SPACES = re.compile(r"[ \t\r\n]*")
LETTER = re.compile(r"[\s\S]?")
ANYTHING = re.compile(r"[\s\S]*")


class Cursor:
    """A place in the text. It stops before the first character that does not match, so that the caller can continue
    there.

    A pattern must be a class of characters, once or repeated (`[^<]*`): no other pattern matches the same however the
    text was cut.
    """

    def __init__(self) -> None:
        self._piece = ""
        self._at = 0
        self._ended = False
        self._held: list[str] = []
        self._held_before = 0  # characters in `_held`, counted because a reader may ask at every character
        self._held_from: int | None = None

    def feed(self, piece: str, steps: Steps[None]) -> None:
        """Let the grammar read all of another piece."""
        assert not self._ended, "text after the end of the text"
        if self._held_from is not None:
            self._keep(self._piece[self._held_from :])
            self._held_from = 0
        self._piece, self._at = piece, 0
        next(steps)

    def end(self, steps: Steps[None]) -> None:
        """Let the grammar finish, because there is no more text."""
        self._ended = True
        for _ in steps:
            raise AssertionError("a grammar waits for text after the end of the text")

    def restart(self) -> None:
        """Make ready for more text after the end, which another grammar reads."""
        self._ended = False
        self._piece, self._at = "", 0

    def hold(self) -> None:
        """Keep the text read from here on, until `release` or `drop`."""
        self._held, self._held_before, self._held_from = [], 0, self._at

    def release(self) -> str:
        """Return the text read since `hold`."""
        assert self._held_from is not None, "nothing is held"
        held = "".join(self._held) + self._piece[self._held_from : self._at]
        self.drop()
        return held

    def drop(self) -> None:
        self._held, self._held_before, self._held_from = [], 0, None

    @property
    def num_held(self) -> int:
        """How many characters of the received text were not released or dropped."""
        if self._held_from is None:
            return 0
        return self._held_before + len(self._piece) - self._held_from

    def _keep(self, part: str) -> None:
        self._held.append(part)
        self._held_before += len(part)

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; the empty string at the end of the text."""
        while self._at == len(self._piece):
            if self._ended:
                return ""
            yield
        return self._piece[self._at]

    def literal(self, *options: str) -> Steps[str]:
        """Read one of these strings, or nothing, and then return the empty string. No option may begin another."""
        seen = ""
        while seen not in options:
            character = yield from self.peek()
            if not character or not any(option.startswith(seen + character) for option in options):
                self._unread(seen)
                return ""
            self._at += 1
            seen += character
        return seen

    def follows(self, option: str) -> Steps[bool]:
        """Whether this string comes next. It is not read."""
        found = yield from self.literal(option)
        self._unread(found)
        return bool(found)

    def _unread(self, seen: str) -> None:
        if len(seen) <= self._at:
            self._at -= len(seen)
            return
        rest = self._piece[self._at :]
        if self._held_from is not None:
            self._keep(self._piece[self._held_from : self._at])
            self._held_from = 0
            self._forget(len(seen))
        self._piece, self._at = seen + rest, 0

    def _forget(self, num_chars: int) -> None:
        """Remove characters from the end of what is held."""
        self._held_before -= num_chars
        while num_chars:
            last = self._held.pop()
            if len(last) > num_chars:
                self._held.append(last[:-num_chars])
                return
            num_chars -= len(last)

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all characters that the pattern matches."""
        parts: list[str] = []
        while (yield from self.peek()) and (part := self.take(pattern)):
            parts.append(part)
        return "".join(parts)

    def take(self, pattern: re.Pattern[str]) -> str:
        """Read the characters that the pattern matches within the current piece; more may come."""
        match = pattern.match(self._piece, self._at)
        assert match is not None, "a pattern must match the empty string"
        self._at = match.end()
        return match[0]

    def take_to(self, find_end: Callable[[str, int], int]) -> str:
        """Read up to the place that `find_end(piece, at)` returns, within the current piece."""
        start, self._at = self._at, find_end(self._piece, self._at)
        return self._piece[start : self._at]
