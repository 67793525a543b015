"""Owns the estimate of how large a pattern is for llguidance, which compares those of an object with each other.
Never refuses a pattern, and is a rule of thumb: what the pattern allows is not worked out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_SIZE = 300
"""From here on llguidance gives up, after a millisecond for each pair."""
_WIDE = 8
"""What a repeated character adds that may be one of several bytes, because it has states for each of them."""
_MOST_DIGITS = 4
_PART = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w+>|[\w-]*:))?)|(?P<close>\))|(?P<choice>\|)"
    r"|(?P<many>(?P<mark>[*+?])|\{(?P<least>[0-9]*)(?P<comma>,?)(?P<most>[0-9]*)\})\??"
    r"|(?P<wide>\.|\[\^(?:\\.|[^\]\\]++)*+\]|\\[DSWw]|\\[pP]\{[^}]*\}|[^\x00-\x7f])"
    r"|\\[xu]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\]++)*+\]|.",
    re.DOTALL,
)
_PLAIN = re.compile(r"\\d|\[[A-Za-z0-9_-]+\]")
_MEMBERS = re.compile("(.)(?:-(.))?")
_SEPARATOR = re.compile(r"\\[^\w\s]|[-_ /:,;=@#~]")


def size_of(pattern: str) -> int:
    """Return a pattern's characters and what its counts add to them, at most MAX_SIZE. A count adds the size of what it
    repeats so often. It multiplies the whole pattern where what it repeats has several lengths, or what precedes it may
    end at many places: llguidance may have to keep each combination apart."""
    if len(pattern) >= MAX_SIZE:  # not read: of ones that do not close what they open, reading takes long
        return MAX_SIZE
    estimate = _Estimate(is_open=not pattern.startswith("^"))
    for part in _PART.finditer(pattern):
        estimate.add(part)
    return min(sum(group.size for group in estimate.groups), MAX_SIZE)


@dataclass(slots=True)
class _Group:
    """`varies`: it may match texts of several lengths."""

    size: int = 0
    varies: bool = False


@dataclass(slots=True)
class _Estimate:
    """`is_open`: what was read may end at many places."""

    is_open: bool
    groups: list[_Group] = field(default_factory=lambda: [_Group()])
    _last: _Group = field(default_factory=_Group)
    _num_ways: int = 1
    """One, and one more for each optional part or alternative."""
    _text: str = ""
    _opened_by: str = ""
    """The part whose repetition comes directly before, if that alone has opened the pattern."""
    _has_closed: bool = False
    """Whether the last part has ended such a repetition."""

    def add(self, part: re.Match[str]) -> None:
        group, text = self.groups[-1], part[0]
        if part["many"]:
            self._repeat(part)
            return
        self._has_closed = bool(self._opened_by) and _is_outside(text, self._opened_by)
        self.is_open &= not self._has_closed
        self._text, self._opened_by = text, ""
        if part["open"]:
            self.groups.append(_Group(len(text)))
        elif part["close"] and len(self.groups) > 1:
            self._last = self.groups.pop()
            self.groups[-1].size += self._last.size + len(text)
            self.groups[-1].varies |= self._last.varies
        else:
            self._last = _Group(_WIDE if part["wide"] else 1)
            group.size += len(text)
            if part["choice"]:
                group.varies = True
                self._num_ways += 1
                self.is_open |= len(self.groups) == 1  # only the first alternative has its `^`

    def _repeat(self, part: re.Match[str]) -> None:
        group, last = self.groups[-1], self._last
        group.size += len(part[0])
        count, varies = _count(part), bool(part["mark"] or part["comma"])
        if count > 1 and (self.is_open or last.varies):
            for one in self.groups:
                one.size = min(one.size * count, MAX_SIZE)
        else:
            group.size += last.size * (count - 1) * self._num_ways
        self._last = _Group(min(last.size * count, MAX_SIZE), last.varies or varies)
        group.varies |= varies
        self._num_ways += part["mark"] == "?"
        if self._has_closed or (varies and part["mark"] != "?"):
            self._opened_by = "" if self.is_open or self._has_closed else self._text
            self.is_open, self._has_closed = True, False


def _is_outside(separator: str, characters: str) -> bool:
    """Whether a character ends the repeated ones before it, because it is none of them."""
    if not _SEPARATOR.fullmatch(separator) or not _PLAIN.fullmatch(characters):
        return False
    members = "0-9" if characters == r"\d" else characters[1:-1]
    return not any(low <= separator[-1] <= (high or low) for low, high in _MEMBERS.findall(members))


def _count(part: re.Match[str]) -> int:
    digits = (part["most"] or part["least"] or "").lstrip("0")
    return min(int(digits[:_MOST_DIGITS] or 1), MAX_SIZE)
