"""The shipped autoscaler and Serve's own policy, each called as in a cluster, on the simulator's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from loadtest.sim.deployment import Deployment
from loadtest.sim.scalers import EngineLoad, Scaler
from loadtest.sim.serve_scaler import ServeDefault, autoscaling_policy, serve_clock
from loadtest.sim.simulation import simulate
from loadtest.sim.workload import Job, poisson
from loadtest.sim.world import World
from serve_app.settings.scaling import ScalingSettings
from tests.support.sim_worlds import STEP_S, scenario

CROWD = [Job(0.05 * i, num_prompt_tokens=20, num_answer_tokens=400) for i in range(40)]  # twenty seconds each


def first_growth_s(world: World) -> float:
    """Return when more replicas ran than at the beginning."""
    return next(at for at, size in world.deployment.sizes if size > 1)


def ours(clock: Callable[[], float]) -> Scaler:
    return EngineLoad(ScalingSettings.model_validate({"upscale_delay_s": 2, "downscale_delay_s": 20}), 1, 6)


def serves(clock: Callable[[], float]) -> Scaler:
    return ServeDefault(8, 1, 6, clock)


def test_serves_policy_adds_replicas_after_thirty_simulated_seconds() -> None:
    """Its delays are measured with `time.time()`: unpatched, it saw a few real milliseconds and never scaled."""
    _, world = simulate(scenario(CROWD, cold_start_s=1.0), scaler=serves)
    assert 30 < first_growth_s(world) < 35


def test_serves_policy_removes_replicas_after_six_hundred_simulated_seconds() -> None:
    figures, world = simulate(scenario(CROWD, replicas=4, cold_start_s=1.0, duration_s=700.0), scaler=serves)
    falls = [at for (_, before), (at, after) in pairwise(world.deployment.sizes) if after < before]
    assert 600 <= falls[0] < 700
    assert figures["ok"] == len(CROWD)


def test_serves_policy_reads_the_real_clock_again_afterwards() -> None:
    with serve_clock(lambda: 5.0):
        assert autoscaling_policy.time.time() == 5.0
    assert autoscaling_policy.time is time


class Broken:
    """A scaler that fails when it is asked for the third time."""

    period_s = 0.5

    def __init__(self) -> None:
        self.num_asked = 0

    def decide(self, deployment: Deployment, now_s: float, num_live: int) -> int:
        self.num_asked += 1
        if self.num_asked == 3:
            raise ZeroDivisionError("no report")
        return 1


def test_a_scaler_that_fails_ends_the_simulation_with_its_own_error() -> None:
    """A simulation that went on without its scaler would give the figures of a deployment that nobody scales."""
    with pytest.raises(ZeroDivisionError, match="no report"):
        simulate(scenario(CROWD), scaler=lambda clock: Broken())


def test_our_policy_adds_replicas_when_its_own_delay_is_over() -> None:
    _, world = simulate(scenario(CROWD, cold_start_s=1.0), scaler=ours)
    assert first_growth_s(world) < 10


def test_our_policy_gives_back_what_a_crowd_needed_and_loses_no_answer() -> None:
    late = poisson(1.0, 200, num_prompt_tokens=20, num_answer_tokens=5, seed=4)
    jobs = sorted([*CROWD, *late], key=lambda job: job.arrival_s)
    figures, world = simulate(scenario(jobs, cold_start_s=1.0, duration_s=200.0), scaler=ours)
    assert 1 <= len(world.deployment.running) <= figures["replicas_most"] / 2
    assert figures["ok"] == len(jobs)


def test_no_policy_goes_beyond_its_bounds() -> None:
    flood = [Job(0.02 * i, num_prompt_tokens=20, num_answer_tokens=100) for i in range(120)]
    for scaler in (ours, serves):
        _, world = simulate(scenario(flood, cold_start_s=1.0), scaler=scaler)
        assert max(size for _, size in world.deployment.sizes) == 6


def test_a_cold_start_is_part_of_what_requests_wait_for() -> None:
    quick, _ = simulate(scenario(CROWD, cold_start_s=1.0), scaler=ours)
    slow, _ = simulate(scenario(CROWD, cold_start_s=15.0), scaler=ours)
    assert slow["queue_mean_ms"] > quick["queue_mean_ms"] + 1000
    assert quick["ttft_p50_ms"] >= 0.999 * STEP_S * 1000


def test_a_fixed_fleet_stays_as_it_is() -> None:
    _, world = simulate(scenario(CROWD, replicas=2))
    assert [size for _, size in world.deployment.sizes] == [1, 2]
