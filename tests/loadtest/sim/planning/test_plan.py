"""A plan from its inputs to its answer, on a made-up machine: what it finds is what a sweep finds, and it says how sure
it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from loadtest.sim.planning.answer import confidence, document_of, interval, lines_of
from loadtest.sim.planning.choices import LOOSER, Choices, guess_replicas, run_seconds
from loadtest.sim.planning.demand import Recorded
from loadtest.sim.planning.evaluate import Result, Run, Simulations
from loadtest.sim.planning.plan import Limits, Plan, make_plan
from loadtest.sim.planning.search import Trial
from loadtest.slo import Goal
from loadtest.traces import Row, Trace
from tests.loadtest.sim.planning.cases import ENGINE, GOAL, MACHINE, MEASURED, START, Formula, case, choices, numbers

LIMITS = Limits(wanted=0.9, most=8)


def planned(rate: float, limits: Limits = LIMITS, kind: type[Simulations] = Formula, **changes: object) -> Plan:
    one = case(numbers(rate), **changes)
    with kind(one, processes=1) as simulations:
        return make_plan(one, limits, choices(one), simulations)


@pytest.fixture
def plan() -> Plan:
    return planned(8.0)


def results(*pairs: tuple[int, int]) -> Result:
    """Make a result of seeds with these numbers of requests and good ones."""
    runs = tuple(Run(offered, good, (), (), 0, 1.0, 1.0, 0.5, 1.0, 0.0, 0, 1, offered) for offered, good in pairs)
    return Result(runs, GOAL, 20.0)


def test_a_plan_holds_what_is_wanted_with_as_few_replicas_as_it_says(plan: Plan) -> None:
    """Eight requests a second of which 90 % must be good, and three that a replica serves."""
    assert plan.is_held
    assert plan.trial.replicas == 3
    assert plan.fewer is not None
    assert plan.fewer.good_share == pytest.approx(6 / 8, abs=1e-3)
    assert 1.1 * plan.highest_load >= 9 / 8 / 0.9 >= plan.highest_load
    assert plan.slower.good_share == pytest.approx(1.0)
    assert plan.trial.settings.ttft_ms == GOAL.ttft_ms


@pytest.mark.slow
def test_a_simulated_plan_holds_what_is_wanted_and_one_replica_less_does_not() -> None:
    plan = planned(8.0, kind=Simulations, few=1, all=1, seconds=10.0)
    assert plan.is_held
    assert plan.result.good_share >= LIMITS.wanted
    assert plan.trial.replicas > 1
    assert plan.fewer is not None
    assert plan.fewer.good_share < LIMITS.wanted


def test_the_document_says_everything_in_plain_numbers(plan: Plan) -> None:
    found = document_of(plan, cost_per_hour=3.0)
    assert found["set"]["engine_replicas"] == plan.trial.replicas
    assert found["costs"]["cost_per_hour"] == 3.0 * plan.trial.replicas
    assert found["costs"]["cost_per_million_answer_tokens"] == pytest.approx(
        1e6 * 3 * plan.trial.replicas / (3600 * 8 * 20)
    )
    low, high = found["holds_what"]["attainment_interval"]
    assert low <= found["holds_what"]["attainment"] <= high
    assert found["nearest"] is None
    text = "\n".join(lines_of(found))
    for told in (
        "What to set",
        "engine_replicas",
        "What it would hold",
        "At what cost",
        "How sure",
        "one replica less",
    ):
        assert told in text


def test_what_cannot_be_held_is_said_with_what_comes_nearest() -> None:
    plan = planned(60.0, Limits(wanted=0.9, most=2))
    found = document_of(plan, None)
    assert not found["holds"]
    assert found["set"]["engine_replicas"] == 2
    assert found["nearest"]["rate_per_s"] == pytest.approx(6 / 0.9, rel=0.11)
    assert found["nearest"]["ttft_ms"] == 9000.0
    text = "\n".join(lines_of(found))
    assert "CANNOT BE HELD: with 2 replicas" in text
    assert "at these targets: " in text


def test_bounds_that_follow_the_load_hold_what_is_wanted() -> None:
    plan = planned(8.0, replace(LIMITS, autoscaling=True, startup_s=2.0))
    assert plan.scaled is not None
    assert plan.scaled.result.good_share >= LIMITS.wanted
    assert (plan.scaled.bounds.least, plan.scaled.bounds.most) == (3, 6)
    found = document_of(plan, 1.0)
    assert found["autoscaling"]["is_cheaper"] is False
    assert found["autoscaling"]["replica_hours_per_hour"] == pytest.approx(3.3)
    text = "\n".join(lines_of(found))
    assert "or autoscaling" in text
    assert "no cheaper" in text


# --- how sure ---------------------------------------------------------------------------------------------------------


def test_the_interval_is_as_wide_as_the_seeds_differ() -> None:
    alike, apart = interval(results((500, 495), (500, 495))), interval(results((500, 500), (500, 490)))
    assert alike == pytest.approx((0.982, 0.9945), abs=1e-3)
    assert apart[0] < alike[0]
    assert apart[1] == 1.0


def test_few_requests_say_little() -> None:
    assert interval(results((20, 20))) == pytest.approx((0.839, 1.0), abs=1e-3)
    assert interval(results()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("result", "slower", "level"),
    [
        (results((2000, 2000), (2000, 1999)), results((10, 10)), "high"),
        (results((2000, 2000), (2000, 1999)), results((10, 8)), "medium"),
        (results((50, 50), (50, 46)), results((10, 10)), "medium"),
        (results((50, 50), (50, 46)), results((10, 8)), "low"),
    ],
)
def test_a_plan_is_as_sure_as_its_interval_and_slower_steps_say(
    plan: Plan, result: Result, slower: Result, level: str
) -> None:
    one = replace(plan, result=result, slower=slower, limits=Limits(0.95), is_held=True)
    assert confidence(one) == level


def test_a_plan_that_is_extrapolated_is_not_sure(plan: Plan) -> None:
    runs = tuple(replace(run, beyond_s=run.step_s) for run in results((2000, 2000), (2000, 2000)).runs)
    one = replace(plan, result=Result(runs, GOAL, 20.0), slower=results((10, 10)), limits=Limits(0.95))
    assert confidence(one) == "medium"
    assert any("beyond what was measured" in line for line in lines_of(document_of(one, None)))


# --- choices ----------------------------------------------------------------------------------------------------------


def test_settings_stay_within_what_was_measured_and_go_with_the_config() -> None:
    every = choices(case()).every()
    assert {one.max_num_batched_tokens for one in every} == {64, 128, 256, 512}
    assert {one.max_num_seqs for one in every} == {8, 16, 32}
    assert {one.tpot_ms for one in every} == {120, 120 * LOOSER, None}
    assert {one.load_factor for one in every} == {1.25}
    assert all(one.max_num_batched_tokens > one.max_num_seqs for one in every)
    assert choices(case()).start() == START


def test_each_axis_changes_one_setting() -> None:
    for axis in choices(case()).axes(START):
        for one in axis:
            names = ("tpot_ms", "ttft_ms", "max_num_batched_tokens", "max_num_seqs", "load_factor")
            assert sum(getattr(one, name) != getattr(START, name) for name in names) == 1


def test_settings_for_shared_prefixes_are_only_searched_where_prompts_share_any() -> None:
    rows = tuple(Row(float(at), 600, 5, (1, 2)) for at in range(4))
    demand = Recorded.of(Trace(rows), longest=ENGINE.longest, num_stretches=1)
    found = Choices(MACHINE, ENGINE, GOAL, demand, EngineConfig()).every()
    assert {one.load_factor for one in found} == {1.25, 2.0}


def test_a_target_that_nobody_wants_is_not_searched() -> None:
    found = Choices(MACHINE, ENGINE, Goal(1500, None), numbers(1.0), EngineConfig()).every()
    assert {(one.tpot_ms, one.ttft_ms) for one in found} == {(None, 1500), (None, None)}


def test_a_config_that_no_choice_goes_with_is_refused() -> None:
    config = EngineConfig(num_speculative_tokens=63, max_num_batched_tokens=40_000, max_num_seqs=8)
    with pytest.raises(ValueError, match="no max_num_seqs"):
        Choices(MACHINE, ENGINE, GOAL, numbers(1.0), config).start()


def test_runs_are_long_enough_to_tell_and_the_guess_grows_with_the_rate() -> None:
    assert run_seconds(numbers(2.0), GOAL, MACHINE) == 75.0
    assert run_seconds(numbers(1000.0), GOAL, MACHINE) >= 3 * (1.5 + 20 * 0.12)
    guesses = [guess_replicas(numbers(rate), MACHINE, 32) for rate in (0.1, 5.0, 50.0)]
    assert guesses == sorted(guesses)
    assert guesses[0] == 1
    assert guesses[-1] > 5


def test_a_trial_of_a_plan_is_of_the_whole_demand(plan: Plan) -> None:
    assert plan.trial == Trial(plan.trial.settings, plan.trial.replicas, load=1.0, thorough=True)
    assert plan.case.machine.measured == MEASURED
