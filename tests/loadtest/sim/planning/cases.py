"""Owns small plans for tests: a made-up machine whose capacity is known, and short runs.
Never reads a measurement."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from engine.scheduling.step_time import StepCosts, StepWork
from loadtest.sim.planning.choices import Choices
from loadtest.sim.planning.demand import Demand, Lengths, Numbers
from loadtest.sim.planning.evaluate import Case, Settings
from loadtest.sim.planning.machine import Engine, Machine
from loadtest.slo import Goal

MEASURED = StepWork(512, 32, 100_000, 2_000_000, 0, 512)
MACHINE = Machine("made up", StepCosts((1, 512), (0.02, 0.53), key_s=1e-7, attended_s=1e-7), 0.03, MEASURED)
"""A millisecond a token, and 20 for each step."""
ENGINE = Engine(kv_tokens=64_000, max_model_len=4096)
GOAL = Goal(ttft_ms=1500, tpot_ms=120)
START = Settings(tpot_ms=120, ttft_ms=1500, max_num_batched_tokens=512, max_num_seqs=32)


def numbers(rate: float, prompt: float = 150, answer: float = 20) -> Numbers:
    return Numbers(rate, Lengths.of(prompt), Lengths.of(answer), ENGINE.longest)


def case(demand: Demand | None = None, **changes: Any) -> Case:
    settings: dict[str, Any] = {
        "demand": demand or numbers(4.0),
        "machine": MACHINE,
        "engine": ENGINE,
        "goal": GOAL,
        "seconds": 20.0,
        "few": 1,
        "all": 2,
    }
    return Case(**{**settings, **changes})


def choices(one: Case) -> Choices:
    return Choices(one.machine, one.engine, one.goal, one.demand, EngineConfig())
