"""No token is lost, made up or computed needlessly, and the same seed gives the same world."""

from __future__ import annotations

import asyncio

import pytest

from engine.config import SchedulerConfig
from loadtest.sim.routers import PowerOfTwo, PrefixAffine, RoundRobin, Router
from loadtest.sim.simulation import simulate
from loadtest.sim.workload import Job, poisson
from loadtest.sim.world import World
from loadtest.traces import BLOCK_TOKENS
from tests.support.sim_worlds import scenario


def is_at_rest(world: World) -> bool:
    """Return whether no request holds anything any more."""
    loads = [replica.load() for replica in world.deployment.running.values()]
    held = [load.num_held_blocks or load.num_running or load.num_waiting for load in loads]
    gate = world.gate.snapshot()
    return not any(held) and not (gate.num_live or gate.num_dispatched or gate.num_queued_tokens or world.ends)


def test_each_token_is_computed_once_where_memory_suffices() -> None:
    jobs = poisson(5.0, 60, num_prompt_tokens=50, num_answer_tokens=9, seed=2)
    figures, world = simulate(scenario(jobs, replicas=2))
    assert figures["output_tokens"] == 9 * len(jobs)
    assert figures["computed_tokens"] == (50 + 9 - 1) * len(jobs)
    assert figures["preemptions"] == figures["moves"] == 0
    assert is_at_rest(world)


def test_what_preemption_computes_twice_is_seen_and_changes_no_answer() -> None:
    jobs = [Job(0.1 * i, 60, 40) for i in range(40)]
    tight = {"num_kv_blocks": 24, "scheduler": SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo")}
    figures, world = simulate(scenario(jobs, config={**tight, "enable_prefix_caching": False}))
    assert figures["preemptions"] > 0
    assert figures["output_tokens"] == 40 * len(jobs)
    assert figures["computed_tokens"] > (60 + 40 - 1) * len(jobs)
    assert is_at_rest(world)


def test_an_answer_ends_before_its_limit_where_the_job_says_so() -> None:
    figures, world = simulate(scenario([Job(0.0, 10, 4, max_tokens=100)]))
    assert figures["output_tokens"] == 4
    assert figures["computed_tokens"] == 10 + 4  # the last token is fed, to sample the end
    assert is_at_rest(world)


def test_nothing_is_kept_of_a_request_that_no_engine_takes() -> None:
    too_long = Job(0.2, 256 * 16 + 1, 4)
    figures, world = simulate(scenario([Job(0.0, 10, 4), too_long, Job(0.4, 10, 4)]))
    assert (figures["offered"], figures["ok"], figures["failed"]) == (3, 2, 1)
    assert is_at_rest(world)


def test_a_prefix_that_prompts_share_is_computed_once_at_each_replica_that_gets_one() -> None:
    jobs = [Job(5.0 * i, BLOCK_TOKENS + 20, 2, hash_ids=(7, 100 + i)) for i in range(4)]
    figures, _ = simulate(scenario(jobs))
    assert figures["cached_tokens"] == 3 * BLOCK_TOKENS


def test_prompts_without_hash_ids_share_nothing() -> None:
    figures, _ = simulate(scenario([Job(5.0 * i, 200, 2) for i in range(4)]))
    assert figures["cached_tokens"] == 0


@pytest.mark.parametrize("kind", [RoundRobin, lambda: PowerOfTwo(4), lambda: PrefixAffine(4, 16)])
def test_the_same_seed_gives_the_same_figures_to_the_last_digit(kind: object) -> None:
    assert callable(kind)
    jobs = poisson(6.0, 30, num_prompt_tokens=80, num_answer_tokens=10, seed=6)

    def once() -> object:
        def router() -> Router:
            made = kind()
            assert isinstance(made, RoundRobin | PowerOfTwo | PrefixAffine)
            return made

        return simulate(scenario(jobs, replicas=3, cold_start_s=2.0, seed=9), router, happening=fail_one)[0]

    assert once() == once()


async def fail_one(world: World) -> None:
    await asyncio.sleep(7)
    world.deployment.kill([next(iter(world.deployment.running))])


def test_another_seed_gives_other_arrivals() -> None:
    assert poisson(1.0, 100, 1, 1, seed=1) == poisson(1.0, 100, 1, 1, seed=1)
    assert poisson(1.0, 100, 1, 1, seed=1) != poisson(1.0, 100, 1, 1, seed=2)
