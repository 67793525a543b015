"""Owns the search of a request's own text for what may follow: it finds where the newest tokens occurred before.
Never copies the text, and never looks at more of it than a bound allows: each token is indexed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

MAX_CANDIDATES = 16
"""Maximum number of earlier places that a search for the longest match compares, the latest first."""
MAX_MATCH = 32
"""Matches are not measured beyond this length: longer ones are no better."""


class Match(NamedTuple):
    """An earlier place in the text where the newest tokens occurred."""

    start: int
    """Where the text continues after them."""
    length: int
    """How many tokens are known to match."""


class TextIndex(Protocol):
    """An index over a text that grows at its end and nowhere else."""

    def extend(self, text: Sequence[int], most: int) -> int:
        """Index up to `most` tokens that are new since the last call, and return how many. O(1) a token."""

    def find(self, text: Sequence[int]) -> Match | None:
        """Where the end of `text` occurred before, if anywhere. All of `text` must be indexed."""


class NgramIndex:
    """Finds where the last `most` tokens occurred most recently, or else fewer of them, down to `least`."""

    def __init__(self, least: int, most: int) -> None:
        self._lengths = range(most, least - 1, -1)
        self._latest: dict[tuple[int, ...], int] = {}  # tokens -> where the text continues after their latest place
        self._known = 0  # places that are indexed

    def extend(self, text: Sequence[int], most: int) -> int:
        first = self._known + 1
        self._known = last = min(max(len(text) - 1, self._known), self._known + most)
        for place in range(first, last + 1):  # the end of the text is not indexed: nothing follows it
            for length in self._lengths:
                if length <= place:
                    self._latest[tuple(text[place - length : place])] = place
        return last + 1 - first

    def find(self, text: Sequence[int]) -> Match | None:
        for length in self._lengths:
            if length < len(text) and (place := self._latest.get(tuple(text[-length:]))):
                return Match(place, length)
        return None


class SuffixIndex:
    """Finds the place with the longest match of the last tokens, with hash chains as in LZ77 compressors.

    Every place is in a chain with the earlier places that follow the same `least` tokens. A search goes along a chain
    from its latest place; the longest match among MAX_CANDIDATES wins, and the latest among equally long ones. A suffix
    automaton would find the longest of all, but takes some 1,000 bytes a token in Python; this takes 200.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._latest: dict[tuple[int, ...], int] = {}  # tokens -> where the text continues after their latest place
        self._earlier = [0] * least  # place -> the place before it in its chain; 0: none
        """No place before `least` is in a chain, so 0 is never a place."""

    def extend(self, text: Sequence[int], most: int) -> int:
        least, latest, earlier = self._least, self._latest, self._earlier
        first = len(earlier)
        last = min(max(len(text) - 1, first - 1), first - 1 + most)
        for place in range(first, last + 1):
            key = tuple(text[place - least : place])
            earlier.append(latest.get(key, 0))
            latest[key] = place
        return last + 1 - first

    def find(self, text: Sequence[int]) -> Match | None:
        found, end = None, len(text)
        length = self._least - 1
        place = self._latest.get(tuple(text[-self._least :]), 0)
        for _ in range(MAX_CANDIDATES):
            if not place or length >= MAX_MATCH:
                break
            if place > length and text[place - 1 - length] == text[end - 1 - length]:  # else the match is not longer
                same = self._measure(text, place)
                if same > length:
                    found, length = Match(place, same), same
            place = self._earlier[place]
        return found

    def _measure(self, text: Sequence[int], place: int) -> int:
        """How many tokens before `place` match those before the end, up to MAX_MATCH."""
        end, most = len(text), min(place, MAX_MATCH)
        length = self._least
        while length < most and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        return length


def continuation(text: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on. If the text ends before that, its tokens from `start` on are repeated."""
    found = tuple(text[start : start + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found
