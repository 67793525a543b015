"""When the requests of an open load are due."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from loadtest.arrivals import PROCESSES, Profile, cv_of, due_times


def times(profile: Profile, process: str, seed: int = 1, cv: float = 1.0) -> list[float]:
    return list(due_times(profile, process, seed, cv))


def test_a_constant_process_has_the_same_gap_between_all_requests() -> None:
    found = times(Profile.constant(4.0, 3.0), "constant")
    assert found == pytest.approx([0.25 * i for i in range(1, 12)])


@pytest.mark.parametrize(
    ("process", "cv", "expected"), [("poisson", 1.0, 1.0), ("gamma", 3.0, 3.0), ("gamma", 0.5, 0.5)]
)
def test_a_process_has_the_rate_and_the_burstiness_that_were_asked_for(
    process: str, cv: float, expected: float
) -> None:
    found = times(Profile.constant(50.0, 400.0), process, cv=cv)
    assert len(found) == pytest.approx(20_000, rel=0.08)
    assert cv_of(found) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("process", PROCESSES)
def test_times_are_in_order_and_within_the_profile(process: str) -> None:
    profile = Profile(((2.0, 5.0), (1.0, 0.0), (2.0, 50.0)))
    found = times(profile, process, cv=2.0)
    assert all(earlier <= later for earlier, later in pairwise(found))
    assert all(0 <= at < profile.seconds for at in found)
    assert not [at for at in found if 2.0 < at < 3.0], "no requests where the rate is 0"


def test_each_step_of_a_profile_has_its_rate() -> None:
    found = times(Profile(((100.0, 10.0), (100.0, 50.0), (100.0, 10.0))), "poisson")
    counts = [sum(at // 100 == i for at in found) for i in range(3)]
    assert counts == [pytest.approx(n, rel=0.1) for n in (1000, 5000, 1000)]


def test_the_same_seed_gives_the_same_times_and_another_gives_others() -> None:
    profile = Profile.constant(10.0, 5.0)
    assert times(profile, "poisson", 1) == times(profile, "poisson", 1) != times(profile, "poisson", 2)


def test_a_profile_is_scaled_in_rate_and_length() -> None:
    found = Profile(((2.0, 5.0), (1.0, 10.0))).scaled(rate=2.0, seconds=3.0)
    assert (found.steps, found.seconds, found.expected) == (((6.0, 10.0), (3.0, 20.0)), 9.0, 120.0)


@pytest.mark.parametrize("steps", [(), ((1.0, 0.0),), ((0.0, 5.0),), ((1.0, -1.0), (1.0, 2.0)), ((float("inf"), 1.0),)])
def test_a_profile_without_requests_is_refused(steps: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError):
        Profile(steps)


def test_a_process_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="uniform"):
        times(Profile.constant(1.0, 1.0), "uniform")
    with pytest.raises(ValueError, match="positive"):
        times(Profile.constant(1.0, 1.0), "gamma", cv=0.0)


def test_burstiness_is_of_the_gaps() -> None:
    found = [0.0, 1.0, 1.5, 4.0]
    assert cv_of(found) == pytest.approx(statistics.pstdev([1.0, 0.5, 2.5]) / statistics.mean([1.0, 0.5, 2.5]))
    with pytest.raises(ValueError):
        cv_of([1.0, 2.0])
