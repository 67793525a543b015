"""Owns the comparison of few large replicas with many small ones on the same cards, by the simulator.
Never measures: engines, router and gate are the shipped ones, and steps take what the arithmetic says."""

from __future__ import annotations

from typing import Any

from engine.config import SchedulerConfig, Targets
from loadtest.sim.planning.demand import Lengths, Numbers
from loadtest.sim.routers import PrefixAffine
from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.simulation import simulate
from loadtest.sim.tensor_parallel import Ranks, Shape
from loadtest.slo import Goal

CARDS = 8
SIZES = (8, 4, 2)
RATES = (2.0, 5.0, 8.0, 11.0)
"""Requests a second to all cards together."""
PROMPT, ANSWER = Lengths.of(2000), Lengths.of(300)
SECONDS = 60.0
SEEDS = (0, 1)
GOAL = Goal(ttft_ms=1000, tpot_ms=None, gap_p95_ms=75)
SEATS, TOKENS, LONGEST, BLOCK = 256, 2048, 32_768, 64
FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "good_share", "output_tokens_per_s")
Cell = dict[str, Any]


def run_layout(shape: Shape, size: int, rate: float, seed: int, seconds: float = SECONDS) -> Cell:
    """Simulate CARDS cards as replicas of `size` cards each. The same seed gives each layout the same requests."""
    ranks = Ranks(shape, size)
    config = engine_config(
        num_kv_blocks=ranks.kv_tokens // BLOCK,
        block_size=BLOCK,
        max_model_len=LONGEST,
        max_num_seqs=SEATS,
        max_num_batched_tokens=TOKENS + SEATS,
        max_prefill_tokens=TOKENS,
        scheduler=SchedulerConfig(chunk_halving_context=0),
        targets=Targets(tpot_ms=GOAL.gap_p95_ms),
    )
    demand = Numbers(rate, PROMPT, ANSWER, LONGEST)
    scenario = Scenario(
        jobs=demand.jobs(seed, 1.0, seconds),
        step_time=ranks,
        goal=GOAL,
        config=config,
        replicas=CARDS // size,
        prefill_tokens_per_s=TOKENS / ranks.prefill_s(TOKENS),
        duration_s=seconds,
        seed=seed,
    )
    figures, _ = simulate(scenario, lambda: PrefixAffine(seed, BLOCK))
    found = {name: round(float(figures[name]), 4) for name in FIGURES}
    return {"size": size, "replicas": CARDS // size, "rate": rate, "seed": seed, **found}
