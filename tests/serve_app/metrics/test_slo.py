"""Metrics of service-level targets: first tokens and gaps that met them, and how well steps are predicted."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import Targets
from engine.protocol import SamplingParams, Submission
from engine.scheduling.step_time import StepCosts
from serve_app.metrics.engine_recorder import EngineRecorder
from tests.support.engines import TimedCore, policy

COSTS = StepCosts((1, 100), (0.01, 0.109))  # 9 ms and 1 ms a token
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
ATTAINMENT = "chunkserve:slo_attainment"


def counted(targets: Targets, *sent: tuple[str, int, dict[str, float]], believed: StepCosts = COSTS) -> dict[Any, Any]:
    """Run requests (name, prompt tokens, own targets) together, and return the samples by name and labels."""
    core = TimedCore(COSTS, believed=believed, scheduler=policy(), targets=targets, num_kv_blocks=200)
    recorder = EngineRecorder(core.config, clock=lambda: core.now)
    for name, count, own in sent:
        submission = Submission(name, (1,) * count, PARAMS, **own)  # type: ignore[arg-type]
        recorder.submitted(submission)
        core.send_params(name, submission.prompt_token_ids, PARAMS, **own)
    while core.has_work:
        events = core.keep(core.step())
        recorder.stepped(core.last_step, events)
    return {(sample.name, *sample.labels): sample.value for sample in recorder.samples(core.load())}


def attained(samples: dict[Any, Any], target: str) -> tuple[int, int]:
    return samples[ATTAINMENT, target, "met"], samples[ATTAINMENT, target, "missed"]


def test_each_first_token_and_each_gap_is_counted_by_its_target() -> None:
    """The prompt's step takes 29 ms, and each of the three others 10."""
    for tpot_ms, ttft_ms, tpot, ttft in ((15, 40, (3, 0), (1, 0)), (5, 20, (0, 3), (0, 1))):
        samples = counted(Targets(tpot_ms=tpot_ms, ttft_ms=ttft_ms), ("a", 20, {}))
        assert attained(samples, "tpot") == tpot
        assert attained(samples, "ttft") == ttft


def test_a_request_is_counted_by_its_own_target() -> None:
    """Steps of two streams take 11 ms: too long for one of them."""
    samples = counted(Targets(tpot_ms=5, ttft_ms=10), ("a", 2, {}), ("b", 2, {"tpot_ms": 20.0, "ttft_ms": 100.0}))
    assert attained(samples, "tpot") == (3, 3)
    assert attained(samples, "ttft") == (1, 1)


def test_without_targets_there_are_no_such_numbers() -> None:
    samples = counted(Targets(), ("a", 20, {}))
    assert [name for name in samples if name[0].startswith((ATTAINMENT,))] == []
    half = counted(Targets(ttft_ms=40), ("a", 20, {}))
    assert [name for name in half if name[:2] == (ATTAINMENT, "tpot")] == []


def test_the_corrections_of_predicted_times_are_shown() -> None:
    half = StepCosts((1, 100), tuple(y / 2 for y in COSTS.curve_s))
    samples = counted(Targets(tpot_ms=15), *[(f"r{number}", 20, {}) for number in range(40)], believed=half)
    shown = {name[0]: value for name, value in samples.items() if name[0].startswith("chunkserve:step_time")}
    assert shown.keys() == {f"chunkserve:step_time_{name}" for name in ("scale", "extra_seconds", "deviation")}
    assert shown["chunkserve:step_time_scale"] == pytest.approx(2.0, rel=0.4)
