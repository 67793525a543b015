"""Histograms do not round their values, and can be added."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transport.figures import percentile
from loadtest.histogram import LEAST_MS, Histogram

DURATIONS = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60)
SHARES = [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0]


@given(DURATIONS)
def test_a_percentile_is_that_of_the_values_to_a_bucket(values: list[float]) -> None:
    found = Histogram.of(values).percentiles(SHARES)
    assert found == pytest.approx([percentile(sorted(values), share) for share in SHARES], rel=0.002)


@given(DURATIONS, DURATIONS)
def test_two_histograms_add_up_to_that_of_all_values(some: list[float], others: list[float]) -> None:
    both = Histogram.of(some)
    both.merge(Histogram.of(others))
    whole = Histogram.of(some + others)
    assert (both.counts, both.least, both.most) == (whole.counts, whole.least, whole.most)
    assert both.total == pytest.approx(whole.total)


def test_gaps_of_milliseconds_are_not_rounded_to_whole_ones() -> None:
    """Locust rounds values below 100 ms to whole milliseconds: 7.4 was reported as 7."""
    draw = random.Random(1)
    values = [draw.gauss(7.4, 0.05) for _ in range(2000)]
    assert Histogram.of(values).percentile(0.5) == pytest.approx(7.4, rel=0.004)


def test_least_most_and_mean_are_exact() -> None:
    found = Histogram.of([3.3, 1.1, 2.2])
    assert (found.percentile(0), found.percentile(1), len(found)) == (1.1, 3.3, 3)
    assert found.mean == pytest.approx(2.2)


def test_a_value_too_short_for_a_clock_keeps_the_order() -> None:
    found = Histogram.of([0.0, LEAST_MS / 10, 5.0])
    assert found.percentile(0) == 0.0
    assert found.percentile(0.5) <= LEAST_MS
    assert found.percentile(1) == 5.0


@given(st.lists(st.floats(0, 1e6), max_size=30))
def test_a_histogram_survives_json(values: list[float]) -> None:
    found = Histogram.of(values)
    assert Histogram.from_json(found.to_json()) == found


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="no duration"):
        Histogram().add(value)


def test_an_empty_histogram_has_no_figures() -> None:
    with pytest.raises(ValueError, match="no values"):
        Histogram().percentile(0.5)
    with pytest.raises(ValueError, match="no values"):
        _ = Histogram().mean


def test_a_share_is_of_one() -> None:
    with pytest.raises(ValueError, match="99"):
        Histogram.of([1.0]).percentile(99)
