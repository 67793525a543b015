"""Owns small simulated worlds for the tests: equal jobs, constant steps.
Never reads a trace or a measurement."""

from __future__ import annotations

from typing import Any

from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.step_time import ConstantStep
from loadtest.sim.workload import Job
from loadtest.slo import Goal

STEP_S = 0.05


def scenario(jobs: list[Job], **settings: Any) -> Scenario:
    """Make engines of eight seats whose steps take STEP_S each."""
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_prefill_tokens": 64, "num_kv_blocks": 256}
    config |= settings.pop("config", {})
    return Scenario(
        **{
            "jobs": jobs,
            "step_time": ConstantStep(STEP_S),
            "goal": Goal(ttft_ms=1000, tpot_ms=100),
            "config": engine_config(**config),
            **settings,
        }
    )
