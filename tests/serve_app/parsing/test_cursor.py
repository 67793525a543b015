"""Owns the contract of the cursor: what is held costs the same for each further character, however much it is.
Never tests a grammar; the parsers' tests do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from serve_app.parsing.cursor import ANYTHING, LETTER, Cursor, Steps


class Counted(list[str]):
    """Counts how many of its items are looked at in a row."""

    num_seen = 0

    def __iter__(self) -> Iterator[str]:
        self.num_seen += len(self)
        return super().__iter__()


def test_how_much_is_held_is_not_counted_again_at_every_piece() -> None:
    """A stop string's reader asks at every character: 25,000 characters of arguments took 8 ms for each token."""

    def grammar() -> Steps[None]:
        cursor.hold()
        yield from cursor.run(ANYTHING)

    cursor = Cursor()
    steps = grammar()
    cursor.feed("a", steps)
    held = cursor._held = Counted(cursor._held)
    for number in range(2, 1000):
        cursor.feed("b", steps)
        assert cursor.num_held == number
    assert held.num_seen == 0
    assert cursor.release() == "a" + "b" * 998
    assert cursor.num_held == 0


def test_a_tag_that_fails_across_pieces_does_not_copy_what_is_held() -> None:
    def grammar() -> Steps[None]:
        cursor.hold()
        while (yield from cursor.peek()):
            assert not (yield from cursor.literal("<end>"))
            cursor.take(LETTER)

    cursor = Cursor()
    steps, size, num_bytes = grammar(), 4000, 0
    cursor.feed("a" * size, steps)
    tracemalloc.start()
    try:
        for character in "<e" * size:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            cursor.feed(character, steps)
            num_bytes += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert num_bytes < 2 * size * 2000, "allocated in all; each copy would be of 4,000 characters or more"
    assert cursor.num_held == 3 * size
    cursor.end(steps)
    assert cursor.release() == "a" * size + "<e" * size
