"""The requests that plans are made for: their lengths, their rate, and that a load only squeezes them."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.planning.demand import MOST_RATIO, Lengths, Numbers, Recorded
from loadtest.traces import Row, Trace

LONGEST = 100_000
NUMBERS = Numbers(4.0, Lengths.of(500, 1500), Lengths.of(100), LONGEST)


def recorded(*times: float, num_stretches: int = 1, rate: float | None = None, longest: int = LONGEST) -> Recorded:
    rows = tuple(Row(at, 10 + number, 5) for number, at in enumerate(times))
    return Recorded.of(Trace(rows), longest=longest, num_stretches=num_stretches, rate=rate)


@pytest.mark.parametrize(("mean", "p95"), [(500, 1500), (100, 120), (2000, 7000), (50, 50)])
def test_lengths_have_the_mean_and_the_95th_percentile_that_were_asked_for(mean: float, p95: float) -> None:
    random, lengths = Random(1), Lengths.of(mean, p95)
    drawn = sorted(lengths.draw(random, 10**9) for _ in range(40_000))
    assert fmean(drawn) == pytest.approx(mean, rel=0.03)
    assert drawn[int(0.95 * len(drawn))] == pytest.approx(p95, rel=0.03)


@pytest.mark.parametrize("p95", [499, MOST_RATIO * 500 + 1])
def test_a_percentile_that_no_such_distribution_has_is_refused(p95: float) -> None:
    with pytest.raises(ValueError, match=r"95th percentile of .*: expected from 1 to 3.87 times the mean 500"):
        Lengths.of(500, p95)


def test_numbers_arrive_at_their_rate_and_fit_an_engine() -> None:
    jobs = Numbers(4.0, Lengths.of(500), Lengths.of(100), 600).jobs(3, 1.0, 2000.0)
    assert len(jobs) / 2000 == pytest.approx(4.0, rel=0.05)
    assert max(job.num_prompt_tokens + job.num_answer_tokens for job in jobs) == 600


@given(st.integers(0, 5), st.floats(0.2, 4.0))
def test_a_load_squeezes_the_same_requests(seed: int, load: float) -> None:
    """Otherwise two loads would differ by luck, too."""
    plain, loaded = NUMBERS.jobs(seed, 1.0, 30.0 * load), NUMBERS.jobs(seed, load, 30.0)
    assert len(plain) == len(loaded)
    for before, after in zip(plain, loaded, strict=True):
        assert after.arrival_s == pytest.approx(before.arrival_s / load)
        assert (after.num_prompt_tokens, after.num_answer_tokens) == (
            before.num_prompt_tokens,
            before.num_answer_tokens,
        )


def test_seeds_differ() -> None:
    assert NUMBERS.jobs(0, 1.0, 30.0) != NUMBERS.jobs(1, 1.0, 30.0)


def test_each_seed_has_another_stretch_of_a_trace_and_together_they_cover_it() -> None:
    demand = recorded(*range(100), num_stretches=4)
    stretches = [demand.jobs(seed, 1.0, 25.0) for seed in range(4)]
    assert [len(jobs) for jobs in stretches] == [25] * 4
    lengths = [job.num_prompt_tokens for jobs in stretches for job in jobs]
    assert len(set(lengths)) > 75, "a load above one needs some more of it, and so they lie a little inside"
    assert demand.covers(25.0, 4) == 1.0
    assert demand.covers(5.0, 4) == pytest.approx(0.2)


def test_a_trace_is_squeezed_by_a_load_with_its_bursts() -> None:
    demand = recorded(0, 1, 1.1, 1.2, 8, 10)
    plain, doubled = demand.jobs(0, 1.0, 12.0), demand.jobs(0, 2.0, 6.0)
    assert [job.arrival_s for job in doubled] == pytest.approx([job.arrival_s / 2 for job in plain])


def test_a_short_trace_is_repeated() -> None:
    demand = recorded(0, 1, 2, 3)
    assert [job.arrival_s for job in demand.jobs(0, 1.0, 10.0)] == pytest.approx(range(10))


def test_a_trace_is_brought_to_a_rate() -> None:
    demand = recorded(*range(50), rate=5.0)
    assert demand.rate == pytest.approx(5.0)
    assert len(demand.jobs(0, 1.0, 10.0)) == 50


def test_what_no_engine_holds_is_left_out_and_counted() -> None:
    demand = recorded(*range(10), longest=20)
    assert (len(demand.recorded), demand.left_out) == (6, 4)


@pytest.mark.parametrize(("times", "longest"), [((0, 1, 2), 5), ((3, 3, 3), LONGEST), ((0,), LONGEST)])
def test_a_trace_of_which_nothing_is_left_is_refused(times: tuple[float, ...], longest: int) -> None:
    with pytest.raises(ValueError, match="too few for a plan"):
        recorded(*times, longest=longest)
