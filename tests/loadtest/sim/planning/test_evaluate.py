"""What trials yield: figures of the requests that count, the same for the same seed, monotone where they must be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from loadtest.sim.planning.evaluate import Bounds, Result, Run, Settings, Simulations, Task, run_task
from loadtest.sim.planning.search import Trial
from loadtest.slo import Goal
from tests.loadtest.sim.planning.cases import GOAL, START, case, numbers

TRIAL = Trial(START, 1)


def run(**changes: float | int) -> Run:
    plain = Run(10, 9, (1.0,), (2.0,), 50, 12.0, 12.0, 6.0, 6.0, 0.0, 3, 1, 12)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_run_counts_the_requests_after_its_warm_up() -> None:
    one = case()
    found = run_task(one, Task(TRIAL, 0))
    jobs = one.demand.jobs(0, 1.0, 24.0)
    assert found.offered == sum(job.arrival_s >= 4.0 for job in jobs) < found.sent == len(jobs)
    assert len(found.ttft) == found.offered
    assert found.total_s == pytest.approx(24.0)
    assert found.replica_s == pytest.approx(24.0)
    assert 0 < found.busy_s <= 24.5
    assert found.good <= found.offered


def test_the_same_task_gives_the_same_run_in_any_process() -> None:
    tasks, one = [[Task(TRIAL, 0)], [Task(replace(TRIAL, replicas=2), 1)]], case(seconds=5.0)
    with Simulations(one, processes=1) as here, Simulations(one, processes=2) as elsewhere:
        assert here.results(tasks) == elsewhere.results(tasks)


def test_more_replicas_do_not_hold_less_and_more_load_does_not_hold_more() -> None:
    with Simulations(case(numbers(12.0), seconds=8.0), processes=1) as simulations:
        shares = [one.good_share for one in simulations.evaluate([replace(TRIAL, replicas=n) for n in (1, 2, 4)])]
        loads = [
            one.good_share for one in simulations.evaluate([replace(TRIAL, load=load) for load in (0.3, 0.6, 1.2)])
        ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert loads == sorted(loads, reverse=True)


def test_an_overloaded_run_ends_and_what_never_came_is_infinitely_late() -> None:
    """Its queue alone would take minutes."""
    found = run_task(case(numbers(100.0)), Task(TRIAL, 0))
    assert found.good < 0.3 * found.offered
    assert math.inf in found.ttft
    (result,) = [Result((found,), GOAL, 20.0)]
    assert result.quantile("ttft", 0.99) is None


def test_slower_steps_than_engines_believe_hold_less() -> None:
    with Simulations(case(numbers(6.0)), processes=1) as simulations:
        plain, slower = simulations.evaluate([TRIAL])[0], simulations.slower(TRIAL, 1.5)
    assert slower.quantile("ttft", 0.5) > plain.quantile("ttft", 0.5)  # type: ignore[operator]
    assert slower.good_share < plain.good_share


def test_settings_reach_the_engine() -> None:
    config = case().config(Settings(None, None, 256, 8))
    assert (config.max_num_batched_tokens, config.max_prefill_tokens, config.max_num_seqs) == (256, 256, 8)
    assert not config.targets.any
    assert config.scheduler.chunk_halving_context == pytest.approx(10_000, rel=0.01), "as costs of attention say"
    assert case().config(START).targets.tpot_ms == 120
    assert case().config(START).scheduler.chunk_halving_context == 0


def test_replicas_follow_the_load_between_their_bounds() -> None:
    with Simulations(case(numbers(16.0), seconds=40.0, all=1), processes=1) as simulations:
        (result,) = simulations.scaled(TRIAL, [Bounds(1, 4, 5.0)])
    assert max(run.replicas_most for run in result.runs) > 1
    assert 1 < result.replicas < 4


def test_a_result_adds_up_its_runs() -> None:
    result = Result((run(), run(offered=30, good=15, beyond_s=3.0, ttft=(3.0, 1700.0))), Goal(1500, None), 20.0)
    assert result.good_share == pytest.approx(24 / 40)
    assert result.shares == pytest.approx([0.9, 0.5])
    assert result.kept("ttft") == pytest.approx(2 / 3)
    assert result.kept("tpot") == 1.0
    assert result.goodput_per_s == pytest.approx(24 / 40)
    assert (result.replicas, result.utilisation, result.extrapolated) == pytest.approx((1.0, 0.5, 0.25))
    assert (result.quantile("ttft", 0.5), result.quantile("ttft", 0.99)) == (3.0, 1700.0)
    assert result.preemptions_per_request == pytest.approx(6 / 24), "of those that do not count, too"


def test_no_request_misses_nothing() -> None:
    empty = Result((run(offered=0, good=0, ttft=(), tpot=()),), GOAL, 20.0)
    assert (empty.good_share, empty.shares, empty.kept("ttft"), empty.quantile("tpot", 0.5)) == (1.0, [], 1.0, None)
