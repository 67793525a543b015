"""Contracts of the search for what may follow a text: a match is really in the text, and no longer one was near.
The oracles look at the whole text for each token, which the indexes never do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.prompt_lookup import (
    MAX_CANDIDATES,
    MAX_MATCH,
    Match,
    NgramIndex,
    SuffixIndex,
    TextIndex,
    continuation,
)

TEXTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 9), max_size=60),
    st.builds(
        lambda part, tail: [*part * 6, *tail], st.lists(st.integers(0, 5), max_size=9), st.lists(st.integers(0, 5))
    ),
)
ALL = 1 << 30


def ending_at(text: Sequence[int], place: int) -> int:
    """Count the tokens before `place` that equal the last ones of the text."""
    length = 0
    while length < place and text[place - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def ngram_oracle(text: Sequence[int], least: int, most: int) -> Match | None:
    for length in range(most, least - 1, -1):
        places = [place for place in range(1, len(text)) if ending_at(text, place) >= length]
        if places:
            return Match(places[-1], length)
    return None


def suffix_oracle(text: Sequence[int], least: int) -> Match | None:
    places = [place for place in range(1, len(text)) if ending_at(text, place) >= least][-MAX_CANDIDATES:]
    longest = max(places, key=lambda place: (min(ending_at(text, place), MAX_MATCH), place), default=None)
    return None if longest is None else Match(longest, min(ending_at(text, longest), MAX_MATCH))


def grown(index: TextIndex, text: Sequence[int], steps: Sequence[int]) -> Match | None:
    """Return what is found at the end, when the text arrived in pieces."""
    end = 0
    for step in steps:
        end = min(end + step, len(text))
        index.extend(text[:end], ALL)
        index.find(text[:end])
    index.extend(text, ALL)
    return index.find(text)


@given(text=TEXTS, least=st.integers(1, 4), more=st.integers(0, 3), steps=st.lists(st.integers(0, 9)))
def test_ngrams_are_found_at_their_latest_place_the_longest_first(
    text: list[int], least: int, more: int, steps: list[int]
) -> None:
    assert grown(NgramIndex(least, least + more), text, steps) == ngram_oracle(text, least, least + more)


@given(text=TEXTS, least=st.integers(1, 4), steps=st.lists(st.integers(0, 9)))
def test_the_longest_match_among_the_latest_places_is_found(text: list[int], least: int, steps: list[int]) -> None:
    assert grown(SuffixIndex(least), text, steps) == suffix_oracle(text, least)


def test_a_longer_match_wins_over_a_later_one() -> None:
    text = [1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4]
    assert grown(SuffixIndex(2), text, ()) == Match(4, 4)
    assert grown(NgramIndex(2, 2), text, ()) == Match(7, 2)
    assert grown(NgramIndex(2, 3), text, ()) == Match(4, 3)


@pytest.mark.parametrize("make", [lambda: NgramIndex(1, 3), lambda: SuffixIndex(1)])
def test_what_is_indexed_at_a_time_is_bounded_and_what_was_left_comes_next(make: type[TextIndex]) -> None:
    text = [*range(100), *range(100)]
    index = make()
    counts = [index.extend(text, 60) for _ in range(5)]
    assert counts[:3] == [60, 60, 60]
    assert sum(counts) <= len(text) - 1
    assert counts[4] == 0
    assert index.find(text) == Match(100, 3 if isinstance(index, NgramIndex) else MAX_MATCH)
    assert index.extend([*text, 7], 60) == 1


@pytest.mark.parametrize("make", [lambda: NgramIndex(2, 4), lambda: SuffixIndex(2)])
@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2], [1, 2, 3, 4]])
def test_a_text_that_repeats_nothing_has_no_match(make: type[TextIndex], text: list[int]) -> None:
    assert grown(make(), text, ()) is None


def test_a_continuation_that_reaches_the_texts_end_goes_round() -> None:
    assert continuation([5, 1, 2, 3], 1, 2) == (1, 2)
    assert continuation([5, 1, 2, 3], 1, 8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert continuation([7, 7], 1, 3) == (7, 7, 7)
