"""Which workers of a load are missing, by when they were last heard of."""

from __future__ import annotations

import pytest

from loadtest.presence import lost_workers


@pytest.mark.parametrize(
    ("heard", "done", "now", "expected"),
    [
        ({"a": 100.0, "b": 99.0}, (), 105.0, []),
        ({"a": 100.0, "b": 89.0}, (), 100.0, ["worker b was lost"]),
        ({"a": 100.0, "b": 50.0}, ("b",), 100.0, []),
        ({}, (), 50.0, []),
        ({}, (), 70.5, ["no worker began"]),
        ({"a": 70.0}, (), 69.5, []),
        ({"a": 70.0}, (), 70.5, ["only 1 of 2 workers began"]),
        ({"a": 20.0}, ("a",), 70.5, ["only 1 of 2 workers began"]),
    ],
)
def test_a_worker_is_lost_that_falls_silent_or_never_says_a_word(
    heard: dict[str, float], done: tuple[str, ...], now: float, expected: list[str]
) -> None:
    """The others would wait for it, before the next point, for ever. The load began at 10 s."""
    assert lost_workers(heard, done, 2, 10.0, now) == expected
