"""Plans beside a sweep of all settings: the kept study, and a small one that is run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.server import ROOT
from loadtest.sim.planning.evaluate import Result, Run, Simulations
from loadtest.sim.planning.plan import Limits
from loadtest.sim.planning.search import Trial
from loadtest.sim.planning.study import LOADS, WANTED, best_of, case_of, compare, is_within
from loadtest.traces import read_trace
from tests.loadtest.sim.planning.cases import GOAL, START

KEPT = ROOT / "loadtest" / "results" / "plan.json"
SAMPLES = Path(__file__).parents[2] / "traces"


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text())["loads"]
    return found


def result(good: int, offered: int = 100) -> Result:
    return Result((Run(offered, good, (), (), 0, 1.0, 1.0, 0.5, 1.0, 0.0, 0, 1, offered),), GOAL, 20.0)


def test_the_kept_study_is_of_three_traces() -> None:
    assert set(kept()) == set(LOADS)
    assert len(LOADS) == 3


@pytest.mark.parametrize("name", LOADS)
def test_a_kept_plan_is_within_five_percent_of_the_best_of_the_sweep(name: str) -> None:
    """What the file says of itself, and what its sweep says."""
    found = kept()[name]
    assert is_within(found)
    assert "unheld" not in found
    held = [row for row in found["sweep"] if row[-2] >= WANTED]
    fewest = min(row[-3] for row in held)
    assert found["plan"]["replicas"] <= 1.05 * fewest
    assert found["plan"]["goodput_per_s"] >= 0.95 * max(row[-1] for row in held if row[-3] == fewest)
    assert found["trials"]["plan"] < found["trials"]["sweep"]


@pytest.mark.parametrize("name", LOADS)
def test_a_kept_sweep_has_every_setting_with_every_number_of_replicas(name: str) -> None:
    found = kept()[name]
    rows = {tuple(row[:-2]) for row in found["sweep"]}
    assert len(rows) == len(found["sweep"]) == found["trials"]["sweep"]
    assert {row[-1] for row in rows} == set(range(1, found["plan"]["replicas"] + 1))


def test_the_best_is_the_cheapest_that_holds_and_then_the_one_with_the_most_good_answers() -> None:
    trials = [Trial(START, replicas, load, thorough=True) for replicas in (1, 2, 3) for load in (1.0, 2.0)]
    shares = (94, 90, 96, 97, 100, 99)
    found = dict(zip(trials, map(result, shares), strict=True))
    assert best_of(found, 0.95) == trials[3]
    assert best_of(found, 1.0) == trials[4]
    assert best_of({trials[0]: result(94), trials[1]: result(90)}, 0.95) == trials[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "like"), [("azure_sample.csv", "azure_conv"), ("mooncake_sample.jsonl", "mooncake_conv")]
)
def test_a_plan_for_a_sample_of_a_trace_is_within_five_percent_of_a_sweep(sample: str, like: str) -> None:
    one = case_of(read_trace(SAMPLES / sample), replace(LOADS[like], seconds=15.0), seeds=2)
    with Simulations(one, processes=1) as simulations:
        found = compare(one, simulations, Limits(WANTED, most=4))
    assert is_within(found)
    assert found["best"]["good_share"] >= WANTED
