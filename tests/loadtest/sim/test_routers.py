"""Which replica gets a request: each in turn, the shorter of two queues, or the one that has its prefix."""

from __future__ import annotations

from engine.protocol import SamplingParams, Submission
from loadtest.sim.routers import PowerOfTwo, PrefixAffine, RoundRobin
from loadtest.sim.simulation import simulate
from loadtest.sim.virtual_loop import run
from loadtest.sim.workload import Job
from loadtest.sim.world import World
from loadtest.traces import BLOCK_TOKENS
from tests.support.sim_worlds import scenario

ASK = Submission("r0", (5, 1, 1), SamplingParams(max_tokens=1, seed=0))


def tokens_by_replica(world: World) -> list[int]:
    return [replica.num_computed_tokens for replica in world.deployment.running.values()]


def test_round_robin_gives_each_replica_as_many() -> None:
    jobs = [Job(float(i), 30, 2) for i in range(12)]
    _, world = simulate(scenario(jobs, replicas=3), RoundRobin)
    assert tokens_by_replica(world) == [4 * 31] * 3


def test_the_shorter_of_two_queues_is_chosen() -> None:
    """The first request lasts long; with two replicas, all later ones that come while it runs go to the other."""
    jobs = [Job(0.0, 50, 200), *(Job(1.0 + i, 10, 1) for i in range(8))]
    _, world = simulate(scenario(jobs, replicas=2), lambda: PowerOfTwo(1))
    assert sorted(tokens_by_replica(world)) == [8 * 10, 50 + 199]


def test_prompts_with_one_head_go_to_the_replica_that_has_it() -> None:
    jobs = [Job(3.0 * i, BLOCK_TOKENS + 20, 2, hash_ids=(i % 3, 100 + i)) for i in range(12)]
    affine, _ = simulate(scenario(jobs, replicas=3), lambda: PrefixAffine(1, 16))
    in_turn, _ = simulate(scenario([jobs[i] for i in range(12)], replicas=2), RoundRobin)
    assert affine["cached_tokens"] == 9 * BLOCK_TOKENS
    assert in_turn["cached_tokens"] < affine["cached_tokens"]


def test_no_router_chooses_where_no_replica_runs() -> None:
    for router in (RoundRobin(), PowerOfTwo(0), PrefixAffine(0, 16)):
        router.update({})
        assert router.choose("r0", ASK, [], 0.0) is None


def test_a_replica_to_avoid_is_chosen_only_if_it_is_the_only_one() -> None:
    async def choices() -> list[set[str]]:
        world = World(scenario([Job(0.0, 1, 1)]), RoundRobin())
        world.deployment.scale(2, warm=True)
        found = []
        for router in (RoundRobin(), PowerOfTwo(0), PrefixAffine(0, 16)):
            for running in (dict(world.deployment.running), {"replica-0": world.deployment.running["replica-0"]}):
                router.update(running)
                chosen = [router.choose(f"r{i}", ASK, ["replica-0"], 0.0) for i in range(6)]
                found.append({replica.name for replica in chosen if replica is not None})
        return found

    assert run(choices()) == [{"replica-1"}, {"replica-0"}] * 3
