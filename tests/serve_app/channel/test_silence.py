"""Contracts of who counts as silent. It is counted in looks,
so that neither a clock nor a pause of the observer matters."""

from __future__ import annotations

from serve_app.channel.silence import LOOK_S, Silence

MOST = 20


def silence() -> Silence:
    return Silence(MOST * LOOK_S)


def look(at: Silence, times: int = 1) -> frozenset[str]:
    for _ in range(times):
        at.look()
    return at.silent


def test_an_engine_that_was_not_heard_of_for_so_many_looks_is_silent_and_no_other() -> None:
    at = silence()
    at.heard("a")
    assert look(at, MOST) == set()
    at.heard("b")
    assert look(at) == {"a"}
    assert at.known == {"a", "b"}


def test_an_engine_that_is_heard_of_again_is_silent_no_more() -> None:
    at = silence()
    at.heard("a")
    look(at, 2 * MOST)
    at.heard("a")
    assert look(at, MOST) == set()


def test_an_engine_that_never_said_anything_is_silent_from_when_something_was_sent_there() -> None:
    at = silence()
    assert look(at, 2 * MOST) == set()
    at.expect("a")
    assert look(at, MOST) == set()
    at.expect("a")  # what is sent there later makes the silence no younger
    assert look(at) == {"a"}


def test_a_late_engine_is_silent_at_once_until_a_beat_says_otherwise() -> None:
    at = silence()
    at.heard("a", is_late=True)
    assert at.silent == {"a"}
    at.heard("a")  # a frame that was on its way
    assert at.silent == {"a"}
    at.heard("a", is_late=False)
    assert at.silent == set()


def test_engines_that_are_gone_are_forgotten() -> None:
    at = silence()
    at.heard("a", is_late=True)
    at.heard("b")
    look(at, 2 * MOST)
    at.keep({"b", "c"})
    assert (at.known, at.silent) == ({"b"}, {"b"})
