"""Owns sets of characters: what a class of a regex matches, as ranges of code points.
Never reads a regex."""

from __future__ import annotations

import sys
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending, not adjacent, both ends included. Has no surrogates, which do not occur in a text."""

_SURROGATES = (0xD800, 0xDFFF)
LAST = sys.maxunicode


def ranges(found: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of any ranges."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def characters(text: Iterable[str]) -> Ranges:
    return ranges((ord(character), ord(character)) for character in text)


def inverted(found: Ranges) -> Ranges:
    gaps, place = [], 0
    for first, last in (*ranges((*found, _SURROGATES)), (LAST + 1, LAST + 1)):
        if first > place:
            gaps.append((place, first - 1))
        place = last + 1
    return tuple(gaps)


EVERY = inverted(())


def without(found: Ranges, others: Ranges) -> Ranges:
    kept = []
    for first, last in found:
        for other_first, other_last in others:
            if other_last < first or other_first > last:
                continue
            if other_first > first:
                kept.append((first, other_first - 1))
            first = other_last + 1
        if first <= last:
            kept.append((first, last))
    return tuple(kept)


def has(found: Ranges, character: str) -> bool:
    code = ord(character)
    return any(first <= code <= last for first, last in found)


def as_class(found: Ranges) -> str:
    """Write a set as a regex's character class."""
    if len(found) == 1 and found[0][0] == found[0][1]:
        return _written(found[0][0])
    parts = [_written(first) + (f"-{_written(last)}" if last > first else "") for first, last in found]
    return f"[{''.join(parts)}]"


def _written(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


def in_both_cases(found: Ranges) -> Ranges:
    """Add the characters that differ from a set's own only in case."""
    codes, groups = _alike()
    spans = [groups[bisect_left(codes, first) : bisect_left(codes, last + 1)] for first, last in found]
    alike = dict.fromkeys(group for span in spans for group in span)
    return ranges((*found, *characters("".join(alike))))


def num_alike(found: Ranges) -> int:
    """Count the work that `in_both_cases` takes."""
    codes, _ = _alike()
    return sum(bisect_left(codes, last + 1) - bisect_left(codes, first) for first, last in found)


@cache
def _alike() -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return, in ascending order, the characters that share their case folding with another, and each one's group."""
    groups: dict[str, str] = {}
    for code in range(0x20000):
        character = chr(code)
        folded = character.casefold()
        if folded != character and len(folded) == 1:
            groups[folded] = groups.get(folded, folded) + character
    pairs = sorted((ord(character), group) for group in groups.values() for character in group)
    return tuple(code for code, _ in pairs), tuple(group for _, group in pairs)


DIGITS = ranges([(ord("0"), ord("9"))])
WORD = ranges([*DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z"))])
_SPACES = (0x20, 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
SPACE = ranges([(9, 13), (0x2000, 0x200A), *((code, code) for code in _SPACES)])


@lru_cache(256)
def of_category(name: str) -> Ranges:
    """Return the characters of a Unicode general category such as `L` or `Lu`, or () if there is no such category."""
    found = [some for short, some in _categories().items() if name in (short, short[0])]
    return ranges(one for some in found for one in some)


@cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    first = 0
    for code in range(1, LAST + 2):
        if code > LAST or unicodedata.category(chr(code)) != unicodedata.category(chr(first)):
            found.setdefault(unicodedata.category(chr(first)), []).append((first, code - 1))
            first = code
    del found["Cs"]  # surrogates
    return found
