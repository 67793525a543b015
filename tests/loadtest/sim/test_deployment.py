"""Requests survive failures, drains, upgrades and cold starts, with the migration and gate that are shipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loadtest.sim.simulation import simulate
from loadtest.sim.workload import Job, poisson
from loadtest.sim.world import World
from loadtest.timeline import FAILED, OK, Timeline
from tests.support.sim_worlds import STEP_S, scenario

LONG = Job(0.0, num_prompt_tokens=100, num_answer_tokens=200)  # two chunks, then 199 steps: ten seconds
DRAW_S = 1.2  # the longest that a start of 1 s on average takes


def at(second: float, act: Callable[[World], object]) -> Callable[[World], object]:
    async def happen(world: World) -> None:
        await asyncio.sleep(second)
        act(world)

    return happen


def kill_busy(world: World) -> None:
    busy = [name for name, replica in world.deployment.running.items() if replica.num_ongoing]
    assert len(busy) == 1
    world.deployment.kill(busy)


def test_an_answer_goes_on_at_another_replica_after_a_failure_from_where_it_was() -> None:
    """The serving code asserts that each token came once and in order."""
    figures, world = simulate(scenario([LONG], replicas=2), happening=at(5.02, kill_busy))
    assert (figures["ok"], figures["output_tokens"], figures["moves"]) == (1, 200, 1)
    assert len(world.deployment.gone) == 1
    # The other replica computes prompt and answer so far anew: 199 tokens in four chunks, after a pause of 50 ms.
    assert figures["itl_max_ms"] == pytest.approx(1000 * (0.02 + 0.05 + 4 * STEP_S), abs=1)


def test_with_no_replica_left_an_answer_waits_for_the_next_start() -> None:
    figures, _ = simulate(scenario([LONG], replicas=1, cold_start_s=10.0), happening=at(5.0, kill_busy))
    assert (figures["ok"], figures["moves"]) == (1, 1)
    assert 8_000 <= figures["itl_max_ms"] <= 13_000


def test_after_too_many_failures_a_request_fails_and_its_neighbours_do_not() -> None:
    async def chase(world: World) -> None:
        for _ in range(4):
            await asyncio.sleep(1.5)
            long = [name for name, one in world.deployment.running.items() if one.num_ongoing]
            world.deployment.kill(long)

    later = Job(20.0, 10, 5)
    answers: list[Timeline] = []
    crowd = scenario([LONG, later], replicas=2, cold_start_s=1.0)
    figures, world = simulate(crowd, happening=chase, on_answer=answers.append)
    assert [answer.outcome for answer in answers] == [FAILED, OK]
    assert answers[0].error == "503: The engine is not running."
    assert (figures["failed"], figures["failed_share"]) == (1, 0.5)
    assert world.gate.snapshot().num_live == 0


def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    jobs = [LONG, *(Job(6.0 + i, 10, 5) for i in range(4))]
    figures, world = simulate(
        scenario(jobs, replicas=2, drain_s=60.0), happening=at(5.0, lambda w: w.deployment.drain(busy(w)))
    )
    assert figures["moves"] == 0
    [drained] = world.deployment.gone
    assert drained.num_computed_tokens == 100 + 199
    assert figures["ok"] == 5


def test_what_is_left_at_the_end_of_a_drain_moves() -> None:
    figures, _ = simulate(
        scenario([LONG], replicas=2, drain_s=2.0), happening=at(5.0, lambda w: w.deployment.drain(busy(w)))
    )
    assert (figures["ok"], figures["moves"]) == (1, 1)


def busy(world: World) -> str:
    return next(name for name, replica in world.deployment.running.items() if replica.num_ongoing)


def test_a_rolling_upgrade_replaces_every_replica_and_loses_no_request() -> None:
    jobs = poisson(4.0, 60, num_prompt_tokens=30, num_answer_tokens=20, seed=8)

    async def upgrade(world: World) -> None:
        await asyncio.sleep(5)
        await world.deployment.upgrade(surge=2)

    figures, world = simulate(scenario(jobs, replicas=4, cold_start_s=5.0), happening=upgrade)
    assert figures["ok"] == len(jobs)
    assert sorted(world.deployment.running) == [f"replica-{i}" for i in range(4, 8)]
    assert figures["replicas_most"] == 6


def test_an_upgrade_during_which_a_replica_fails_ends_with_as_many_as_before() -> None:
    """Regression: the failure gave up a start that was the upgrade's own, so the upgrade ended with two of four."""
    jobs = poisson(4.0, 60, num_prompt_tokens=30, num_answer_tokens=20, seed=8)

    async def upgrade(world: World) -> None:
        await asyncio.sleep(5)
        upgrade = asyncio.create_task(world.deployment.upgrade(surge=2))
        await asyncio.sleep(1)
        world.deployment.kill(["replica-3"])
        await upgrade

    figures, world = simulate(scenario(jobs, replicas=4, cold_start_s=5.0), happening=upgrade)
    assert figures["ok"] == len(jobs)
    assert len(world.deployment.running) == 4
    assert not world.deployment.running.keys() & {f"replica-{i}" for i in range(4)}


def test_a_zone_that_fails_takes_its_replicas_and_no_request() -> None:
    jobs = poisson(4.0, 40, num_prompt_tokens=30, num_answer_tokens=20, seed=8)
    figures, world = simulate(
        scenario(jobs, replicas=6, num_zones=3, cold_start_s=1.0), happening=at(10, lambda w: w.deployment.kill_zone(1))
    )
    assert {replica.zone for replica in world.deployment.gone} == {1}
    assert len(world.deployment.gone) == 2
    assert len(world.deployment.running) == 6
    assert figures["ok"] == len(jobs)
    assert figures["moves"] > 0


def test_a_replica_is_paid_for_from_its_start_until_it_is_gone() -> None:
    job = Job(0.0, 10, 5)
    figures, _ = simulate(
        scenario([job], replicas=2, duration_s=100.0, cold_start_s=10.0),
        happening=at(50, lambda w: w.deployment.scale(3)),
    )
    assert figures["replica_hours"] * 3600 == pytest.approx(2 * 100 + 50)


def test_a_replica_that_is_starting_is_given_up_before_one_that_runs() -> None:
    def change_mind(world: World) -> None:
        world.deployment.scale(3)
        world.deployment.scale(2)

    figures, world = simulate(scenario([Job(0.0, 10, 5)], replicas=2, duration_s=60.0), happening=at(20, change_mind))
    assert list(world.deployment.running) == ["replica-0", "replica-1"]
    assert figures["replica_hours"] * 3600 == pytest.approx(120)


def test_what_the_gate_cannot_hold_is_refused_and_counts_as_missed() -> None:
    jobs = [Job(0.0, 10, 50) for _ in range(30)]
    figures, _ = simulate(scenario(jobs, config={"max_queued_requests": 4}))
    assert (figures["ok"], figures["rejected"]) == (12, 18)
    assert figures["good_share"] <= 12 / 30
    assert figures["retry_after_share"] == 1.0
