"""Owns a plan from its inputs to its answer: the search, how much more it would hold, and how sure that is.
Never reads a file and never prints: `chunkserve plan` does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from loadtest.sim.planning.choices import Choices, guess_replicas
from loadtest.sim.planning.evaluate import Bounds, Case, Result, Settings, Simulations
from loadtest.sim.planning.search import Found, Search, Trial

SPARE = 2.0
"""Bounds of an autoscaled deployment are up to so many times the replicas that would be fixed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows and wants."""

    wanted: float
    """The share of answers that have to keep all targets, 0 to 1."""
    least: int = 1
    most: int = 16
    autoscaling: bool = False
    startup_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """A deployment whose replicas follow the load."""

    bounds: Bounds
    result: Result


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found. `trial` has the replicas and settings; its load is 1."""

    case: Case
    limits: Limits
    trial: Trial[Settings]
    result: Result
    is_held: bool
    highest_load: float
    """The highest multiple of the demand that this holds; 0 if none above a hundredth."""
    slower: Result
    """The same with steps that all take a deviation longer than measured."""
    fewer: Result | None
    """The same with one replica less, if there may be one."""
    scaled: Scaled | None
    """The bounds that hold at the least cost, if they were asked for and any do."""
    num_trials: int
    compared: list[tuple[Settings, int, float]] = field(default_factory=list)
    """Settings that were compared with all seeds, with replicas and the share of good answers."""


def make_plan(
    case: Case,
    limits: Limits,
    choices: Choices,
    simulations: Simulations,
    say: Callable[[str], None] = lambda phase: None,
) -> Plan:
    """Search, and then find out what was found is worth. `say` is told each phase.

    Raises:
        ValueError: no settings go with the config.
    """
    start = choices.start()
    guess = guess_replicas(case.demand, case.machine, start.max_num_seqs)
    search = Search(
        simulations.evaluate,
        choices.axes,
        start,
        wanted=limits.wanted,
        least=limits.least,
        most=limits.most,
        guess=guess,
    )
    say("searching replicas and settings")
    found = search.run()
    say("searching the highest rate")
    quick = replace(found.trial, thorough=False)
    agree = search.holds(quick) == found.is_held  # the first seeds tell how far the load may rise, or must fall
    highest = search.highest_load(quick if agree else found.trial)
    say("asking how sure that is")
    slower = simulations.slower(found.trial, 1 + case.machine.deviation)
    fewer = None
    if found.trial.replicas > limits.least:
        one_less = replace(found.trial, replicas=found.trial.replicas - 1)
        fewer = search.results.get(one_less) or simulations.evaluate([one_less])[0]
    scaled = None
    if limits.autoscaling and found.is_held:
        say("searching autoscaling bounds")
        scaled = _least_bounds(simulations, found, limits)
    compared = [
        (trial.settings, trial.replicas, result.good_share)
        for trial, result in search.results.items()
        if trial.thorough
    ]
    return Plan(
        case,
        limits,
        found.trial,
        found.result,
        found.is_held,
        highest,
        slower,
        fewer,
        scaled,
        found.num_trials,
        compared,
    )


def _least_bounds(simulations: Simulations, found: Found[Settings, Result], limits: Limits) -> Scaled | None:
    """Return the bounds with which a deployment that follows the load holds at the least cost; None if none does. More
    replicas at the least hold more and cost more, so that the least number is found by bisection."""
    most = min(max(math.ceil(SPARE * found.trial.replicas), 2), limits.most)
    low, high, best = 0, found.trial.replicas + 1, None
    while low + 1 < high:
        middle = (low + high) // 2
        bounds = Bounds(middle, max(most, middle), limits.startup_s)
        (result,) = simulations.scaled(found.trial, [bounds])
        if result.good_share >= limits.wanted:
            high, best = middle, Scaled(bounds, result)
        else:
            low = middle
    return best
