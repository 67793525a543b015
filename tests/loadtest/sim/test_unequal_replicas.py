"""A fleet whose engines are not equally fast: the shipped router, on the engines' own predictions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from engine.config import SchedulerConfig, Targets
from loadtest.sim.routers import PrefixAffine
from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.simulation import Happening, simulate
from loadtest.sim.specs import GPU_LIKE, STEADY
from loadtest.sim.workload import poisson
from loadtest.sim.world import World
from loadtest.tally import Figures
from serve_app.routing.fleet import Fleet

PROMPT, ANSWER = 2000, 50


def unequal(slowness: Sequence[float], *, rate: float = 18.0, seconds: float = 25.0) -> Scenario:
    """Make engines of one GPU each, near the most that they can do."""
    config = engine_config(
        num_kv_blocks=40_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048 + 256,
        max_prefill_tokens=2048,
        scheduler=SchedulerConfig(chunk_halving_context=0),
        targets=Targets(tpot_ms=50, ttft_ms=1000),
    )
    return Scenario(
        jobs=poisson(rate, seconds, PROMPT, ANSWER, seed=1),
        step_time=GPU_LIKE,
        step_deviation=0.05,
        goal=STEADY,
        config=config,
        replicas=len(slowness),
        slowness=slowness,
        prefill_tokens_per_s=GPU_LIKE.prefill_tokens_per_s,
        seed=1,
    )


def run(scenario: Scenario, happening: Happening | None = None) -> tuple[Figures, list[int]]:
    """Return the figures, and the tokens that each replica computed."""
    figures, world = simulate(scenario, lambda: PrefixAffine(1, 16), happening=happening)
    return figures, tokens_of(world)


def tokens_of(world: World) -> list[int]:
    return [replica.num_computed_tokens for replica in world.deployment.running.values()]


def compare_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "predicted_loads", lambda *_: None)


def test_an_engine_half_as_fast_gets_half_as_much_or_less_and_first_tokens_come_sooner_than_by_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets less than half, because its decode rows leave it less than half of the time for prefill."""
    scenario = unequal((1.0, 2.0))
    by_time, (fast, slow) = run(scenario)
    compare_by_tokens(monkeypatch)
    by_tokens, _ = run(scenario)
    assert 2 * slow < fast < 6 * slow
    assert by_time["ttft_p99_ms"] < 0.9 * by_tokens["ttft_p99_ms"]
    assert by_time["ttft_mean_ms"] < by_tokens["ttft_mean_ms"]


def test_a_noisy_neighbour_is_noticed_while_the_engines_run() -> None:
    """Both were measured alike at their start; from a third of the time on, one takes twice as long."""
    since: list[int] = []

    async def neighbour(world: World) -> None:
        await asyncio.sleep(8.0)
        since.extend(tokens_of(world))
        next(iter(world.deployment.running.values())).noise.slowness = 2.0

    _, after = run(unequal((1.0, 1.0)), neighbour)
    slow, fast = (end - begin for begin, end in zip(since, after, strict=True))
    assert since[0] == pytest.approx(since[1], rel=0.2)
    assert fast > 1.6 * slow


def test_equal_engines_share_the_work_evenly() -> None:
    _, (first, second, third) = run(unequal((1.0, 1.0, 1.0)))
    assert max(first, second, third) < 1.2 * min(first, second, third)
