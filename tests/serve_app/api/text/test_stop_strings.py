"""Owns the contract of stop strings.
Never looks at what is held back, only at what comes out."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.text.stop_strings import StopStrings


def reference(text: str, stops: list[str], shown: bool, passed: int = 0) -> str:
    """Read one character at a time. The first stop string that is complete ends the text,
    before it or (if it is shown) after it. None ends within the first `passed` characters."""
    for end in range(passed + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if shown else end - max(map(len, found))]
    return text


def run(pieces: list[str], stops: list[str], shown: bool = False) -> tuple[list[str], bool]:
    scanner = StopStrings(stops, shown=shown)
    sent: list[str] = []
    for piece in pieces:
        sent.append(scanner.push(piece))
        if scanner.matched:
            return sent, True
    return [*sent, scanner.flush()], False


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


# Three characters: overlaps and near misses are the rule, not the exception.
texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=12), st.booleans())
def test_what_is_sent_is_the_text_up_to_the_first_stop_however_it_was_cut(
    text: str, stops: list[str], cuts: list[int], shown: bool
) -> None:
    sent, matched = run(cut(text, cuts), stops, shown)
    assert "".join(sent) == reference(text, stops, shown)
    assert matched == any(stop in text for stop in stops)


def test_a_stop_may_begin_in_text_that_is_skipped_and_none_ends_there() -> None:
    """Its beginning passed unsearched, so that it was not found. Every text of five characters is tried."""
    stops = ["a", "ab", "ba", "aab", "bab", "abab"]
    lists = [list(found) for size in (1, 2) for found in itertools.combinations(stops, size)]
    for letters, found, passed in itertools.product(itertools.product("ab", repeat=5), lists, range(6)):
        text, shown = "".join(letters), passed % 2 == 0
        scanner = StopStrings(found, shown=shown)
        sent = scanner.skip(text[: passed // 2]) + scanner.skip(text[passed // 2 : passed])
        assert scanner.matched is None
        for character in text[passed:]:
            sent += scanner.push(character)
            if scanner.matched:
                break
        else:
            sent += scanner.flush()
        assert sent == reference(text, found, shown, passed)


@settings(deadline=None)
@given(texts, stop_lists)
def test_no_text_is_held_back_that_cannot_begin_a_stop(text: str, stops: list[str]) -> None:
    scanner, sent = StopStrings(stops), ""
    for character in text:
        sent += scanner.push(character)
        if scanner.matched:
            return
        held = text[len(sent) : len(sent + scanner._held)]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_across_pieces_is_found_and_none_of_it_is_sent() -> None:
    assert run(["Hello wo", "rl", "d! more"], ["world"]) == (["Hello ", "", ""], True)


def test_if_two_stops_end_together_the_longer_one_is_cut() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["x"], True)


def test_what_was_held_back_comes_out_when_the_answer_ends_without_a_stop() -> None:
    assert run(["say wor"], ["world"]) == (["say ", "wor"], False)


def test_text_passes_at_once_when_there_are_no_stops() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], False)
