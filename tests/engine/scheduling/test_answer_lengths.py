"""Contracts of what is learned about the lengths of answers: from every length that an answer reached, also if it has
not ended; in bounded memory, and with old answers fading."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from engine.scheduling.answer_lengths import ONE, AnswerLengths, LifeTable, edges_up_to

HORIZONS = (16, 64, 256, 1024)


def lengths(**overrides: int) -> AnswerLengths:
    return AnswerLengths(4096, HORIZONS, **{"median": 256, "window": 512, "max_tenants": 4, **overrides})


def see(known: AnswerLengths, length: int, count: int = 1, *, tenant: str = "", by_itself: bool = True) -> LifeTable:
    """Report answers of one length, from their first token to their last."""
    table, interval = known.enter(tenant), known.interval(length)
    for _ in range(count):
        known.reach(table, 0, interval)
        known.end(table, interval, by_itself=by_itself)
    return table


@pytest.mark.parametrize("longest", [1, 4, 5, 4096, 1_000_000])
def test_every_length_is_in_an_interval_an_eighth_of_it_wide(longest: int) -> None:
    edges = edges_up_to(longest)
    assert edges[-2] <= longest < edges[-1]
    assert len(edges) < 120
    assert all(high - low <= max(4, low / 8) for low, high in pairwise(edges))


def test_before_any_answer_the_median_is_the_priors_and_grows_with_what_was_answered() -> None:
    known = lengths().population
    assert known.survival(0, 256) == pytest.approx(0.5, abs=0.01)
    assert known.survival(1000, 1256) == pytest.approx(0.5, abs=0.01)


def test_what_is_still_to_come_depends_on_what_was_answered() -> None:
    """Half of the answers have 100 tokens and half 1,000: an answer beyond 200 is one of the long ones."""
    known = lengths()
    for _ in range(100):
        see(known, 100)
        see(known, 1000)
    table = known.population
    assert table.survival(0, 50) > 0.95
    assert table.survival(0, 500) == pytest.approx(0.5, abs=0.08)
    assert table.survival(200, 500) > 0.9
    assert table.survival(0, 1300) < 0.05


def test_answers_that_still_run_count_as_far_as_they_got() -> None:
    """In an engine that has just started, the short answers end first.
    Judged by those alone, all answers would be short."""
    known = lengths()
    see(known, 50, 30)
    before = known.population.survival(0, 400)
    for _ in range(70):
        known.reach(known.population, 0, known.interval(400))
    known.population.refresh(None)
    assert before < 0.2
    assert known.population.survival(0, 400) == pytest.approx(0.7, abs=0.1)


def test_answers_that_were_cut_off_are_no_sign_of_short_ones() -> None:
    """With `max_tokens: 50`, or if the client left, the answer would have been longer."""
    ended, cut = lengths(), lengths()
    see(ended, 50, 200)
    see(cut, 50, 200, by_itself=False)
    assert ended.population.survival(0, 100) < 0.1
    assert cut.population.survival(0, 100) > 0.6


def test_a_new_tenant_has_what_all_have_and_then_its_own() -> None:
    known = lengths()
    see(known, 100, 300, tenant="brief")
    assert known.table("verbose") is known.population
    table = known.enter("verbose")
    assert table.survival(0, 200) == pytest.approx(known.population.survival(0, 200), abs=0.05)
    see(known, 2000, 200, tenant="verbose")
    assert known.table("verbose").survival(0, 1000) > 0.8
    assert known.table("brief").survival(0, 1000) < 0.1


def test_tenants_are_bounded_and_whoever_was_away_longest_is_forgotten() -> None:
    known = lengths(max_tenants=2)
    for name in ("a", "b", "a", "c"):
        known.enter(name)
    assert [known.table(name) is known.population for name in ("a", "b", "c")] == [False, True, False]
    assert lengths(max_tenants=0).table("a") is not None
    none = lengths(max_tenants=0)
    none.enter("a")
    assert none.table("a") is none.population


def test_old_answers_fade() -> None:
    """A client's answers become longer: after some windows, the short ones are forgotten."""
    known = lengths(window=64)
    see(known, 50, 2000)
    see(known, 800, 400)
    assert known.population.survival(0, 400) > 0.9


def test_memory_does_not_grow_with_what_is_seen() -> None:
    known = lengths()
    table = see(known, 4096, 5000)
    assert len(table.chances) == len(known.edges) - 1
    for number in range(len(table.chances)):
        table.row(number)
    assert len(table._rows) == len(table.chances)


def test_chances_are_worked_out_seldom_once_much_is_known() -> None:
    known = lengths()
    see(known, 500, 500)
    before = known.population.chances
    see(known, 500, 1)
    assert known.population.chances is before


def test_a_row_says_for_each_horizon_how_many_of_1024_get_there_from_an_intervals_middle() -> None:
    known = lengths()
    see(known, 500, 100)
    row = known.population.row(known.interval(200))
    assert list(row) == sorted(row, reverse=True)
    assert all(0 <= chance <= ONE for chance in row)
    assert row[1] == round(ONE * known.population.survival(known.middle_of(known.interval(200)), 64))
    assert math.isfinite(known.population.survival(4000, 100_000)), "beyond all lengths"


def test_chances_stay_within_bounds_when_answers_are_cut_off_after_their_counts_have_faded() -> None:
    """Regression: such answers were subtracted from counts they were no longer in. Counts and a variance fell below
    zero, and the engine died."""
    known = lengths()
    table, interval = known.enter("t"), known.interval(1580)
    for _ in range(20):
        known.reach(table, 0, interval)
    see(known, 8, 8 * 512, tenant="t")  # enough answers that counts fade several times
    for _ in range(20):
        known.end(table, interval, by_itself=False)
    see(known, 8, 8 * 512, tenant="t")
    for seen in (known.population, table):
        assert all(0 <= chance <= 1 for chance in seen.chances)
        assert all(0 <= chance <= ONE for chance in seen.row(interval))
