"""The search for replicas and settings, as a function of made-up capacities: what it finds, and how much it asks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.sim.planning.search import MOST_LOAD, Search, Trial

WANTED = 0.99
MOST = 40


@dataclass(frozen=True, slots=True)
class Share:
    good_share: float


Settings = tuple[int, ...]
"""An index for each axis."""


@dataclass
class World:
    """A deployment whose replicas have a capacity that depends on each axis by itself, and a demand. Beyond the
    capacity the share of good answers falls."""

    factors: Sequence[Sequence[float]]
    """By axis and value: what the capacity of a replica is multiplied by."""
    demand: float
    luck: float = 0.0
    """With few seeds, capacities seem to be higher by this share."""

    def __post_init__(self) -> None:
        self.asked: list[Trial[Settings]] = []

    def capacity(self, at: Settings) -> float:
        product = 1.0
        for axis, value in zip(self.factors, at, strict=True):
            product *= axis[value]
        return product

    def share(self, trial: Trial[Settings]) -> float:
        room = self.capacity(trial.settings) * trial.replicas * (1.0 if trial.thorough else 1.0 + self.luck)
        return min(1.0, room / (self.demand * trial.load)) ** 2

    def evaluate(self, trials: Sequence[Trial[Settings]]) -> list[Share]:
        self.asked += trials
        return [Share(self.share(trial)) for trial in trials]

    def axes(self, at: Settings) -> list[list[Settings]]:
        return [
            [(*at[:axis], value, *at[axis + 1 :]) for value in range(len(values)) if value != at[axis]]
            for axis, values in enumerate(self.factors)
        ]

    def search(self, *, least: int = 1, most: int = MOST, guess: int = 1) -> Search[Settings, Share]:
        start = tuple(0 for _ in self.factors)
        return Search(self.evaluate, self.axes, start, wanted=WANTED, least=least, most=most, guess=guess)

    def fewest(self, at: Settings) -> int:
        return next(n for n in itertools.count(1) if self.share(Trial(at, n, thorough=True)) >= WANTED)

    def best(self) -> int:
        """Sweep all settings for the fewest replicas that hold."""
        return min(map(self.fewest, itertools.product(*(range(len(axis)) for axis in self.factors))))


FACTORS = st.lists(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(FACTORS, st.floats(0.05, 30.0), st.integers(1, MOST))
def test_it_finds_what_a_sweep_of_all_settings_finds(factors: list[list[float]], demand: float, guess: int) -> None:
    world = World(factors, demand)
    found = world.search(guess=guess).run()
    best = world.best()
    if best > MOST:
        assert not found.is_held
        assert found.trial.replicas == MOST
    else:
        assert found.is_held
        # A gain below LEAST_GAIN is none, so that one replica of many may be missed.
        assert best <= found.trial.replicas <= ceil(best * 1.05 + 1e-9) or found.trial.replicas == best


@settings(max_examples=100, deadline=None)
@given(FACTORS, st.floats(0.05, 60.0), st.integers(1, MOST), st.floats(-0.2, 0.2))
def test_each_trial_is_asked_once_within_the_bounds_and_the_last_word_has_all_seeds(
    factors: list[list[float]], demand: float, guess: int, luck: float
) -> None:
    world = World(factors, demand, luck)
    found = world.search(guess=guess).run()
    assert len(set(world.asked)) == len(world.asked) == found.num_trials
    assert all(1 <= trial.replicas <= MOST and 1 <= trial.load <= MOST_LOAD for trial in world.asked)
    assert found.trial.thorough
    assert found.is_held == (world.share(found.trial) >= WANTED)
    if found.is_held and found.trial.replicas > 1:
        assert world.share(replace(found.trial, replicas=found.trial.replicas - 1)) < WANTED


@settings(max_examples=100, deadline=None)
@given(st.floats(0.05, 20.0), st.integers(1, MOST))
def test_it_asks_far_less_than_a_sweep(demand: float, guess: int) -> None:
    """Four axes of four values and up to forty replicas are 10,240 trials."""
    world = World([[1.0, 1.3, 0.7, 0.9]] * 4, demand)
    world.search(guess=guess).run()
    assert len(world.asked) < 120


def test_luck_with_few_seeds_is_found_out_with_all() -> None:
    """Settings that seemed to need three replicas need four."""
    world = World([[1.0]], 3.1, luck=0.1)
    assert world.search().run().trial == Trial((0,), 4, thorough=True)


def test_bad_luck_with_few_seeds_costs_no_replica() -> None:
    world = World([[1.0]], 2.9, luck=-0.2)
    assert world.search().run().trial == Trial((0,), 3, thorough=True)


def test_a_setting_that_makes_no_difference_stays_as_it_is() -> None:
    world = World([[1.0, 1.0, 1.0], [1.0, 2.0]], 9.0)
    assert world.search().run().trial.settings == (0, 1)


def test_among_settings_that_need_as_many_replicas_the_one_with_the_most_room_is_taken() -> None:
    world = World([[1.0, 2.0, 1.5]], 0.7)
    assert world.search().run().trial == Trial((1,), 1, thorough=True)


def test_settings_that_hold_are_found_where_the_first_ones_never_do() -> None:
    world = World([[0.1, 0.4], [0.5, 1.0]], 10.0)
    found = world.search(most=30).run()
    assert (found.is_held, found.trial) == (True, Trial((1, 1), 25, thorough=True))


def test_what_no_number_of_replicas_holds_is_said_with_what_comes_nearest() -> None:
    world = World([[0.1, 0.2]], 10.0)
    found = world.search(most=20).run()
    assert (found.is_held, found.trial) == (False, Trial((1,), 20, thorough=True))
    assert found.result.good_share == pytest.approx(0.16)


def test_no_fewer_replicas_are_tried_than_allowed() -> None:
    world = World([[1.0, 2.0]], 0.1)
    assert world.search(least=3).run().trial.replicas == 3
    assert min(trial.replicas for trial in world.asked) == 3


@pytest.mark.parametrize("capacity", [0.2, 0.7, 1.0, 1.3, 2.7, 9.0])
def test_the_highest_load_is_found_to_its_precision(capacity: float) -> None:
    world = World([[capacity]], 1.0)
    load = world.search().highest_load(Trial((0,), 1))
    true = min(capacity / WANTED**0.5, MOST_LOAD)
    assert true / 1.11 <= load <= true * (1 + 1e-9)


def test_a_load_that_is_never_held_is_zero() -> None:
    world = World([[1e-4]], 1.0)
    assert world.search().highest_load(Trial((0,), 1)) == 0.0
