"""Owns small plans for tests: a made-up machine whose capacity is known, and short runs.
Never reads a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.scheduling.step_time import StepCosts, StepWork
from loadtest.sim.planning.choices import Choices
from loadtest.sim.planning.demand import Demand, Lengths, Numbers
from loadtest.sim.planning.evaluate import Case, Result, Run, Settings, Simulations, Task
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


class Formula(Simulations):
    """Simulations that compute nothing but how much of the demand a capacity of CAPACITY requests a second for each
    replica is, and that are the worse by a tenth without a target for first tokens."""

    def results(self, groups: Sequence[Sequence[Task]]) -> list[Result]:
        self.tasks = [*getattr(self, "tasks", []), *(task for group in groups for task in group)]
        return [Result(tuple(map(self._run, group)), self._case.goal, self._case.seconds) for group in groups]

    def _run(self, task: Task) -> Run:
        replicas = task.bounds.least if task.bounds else task.trial.replicas
        worth = 1.0 if task.trial.settings.ttft_ms else 0.9
        share = min(1.0, CAPACITY * worth * replicas / (self._case.demand.rate * task.trial.load * task.slowness))
        good = round(1000 * share)
        times = (*(100.0,) * good, *(9000.0,) * (1000 - good))
        paid = replicas * 1.1 if task.bounds else replicas
        return Run(1000, good, times, times, 20_000, paid * 24.0, 24.0, 12.0, 12.0, 0.0, 0, replicas, 1200)


CAPACITY = 3.0
