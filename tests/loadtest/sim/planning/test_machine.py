"""Step times of machines: each form of file is read, and what lies beyond the measured steps is noticed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.calibration import Shape
from engine.scheduling.step_time import StepCosts, StepWork, decode_work, work_of
from engine.step import StepPlan
from loadtest.server import ROOT
from loadtest.sim.planning.machine import (
    NO_LIMIT,
    Machine,
    WatchedSteps,
    engine_of,
    kv_bytes_a_token,
    read_machine,
)
from loadtest.sim.scenario import engine_config
from loadtest.sim.step_time import measured

RESULTS = ROOT / "loadtest" / "results"
COSTS = StepCosts((1, 100), (0.01, 0.11), sample_s=1e-4, key_s=1e-7, attended_s=1e-6)
SETTINGS = {
    **{"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_prefill_tokens": 256, "max_model_len": 4096},
    **{"num_kv_blocks": 1000, "block_size": 16, "device": "cpu"},
}


def step(decodes: int, context: int, chunk: int = 0) -> StepPlan:
    return Shape(decodes, chunk, context).plan(engine_config(), has_state=False)


def kept(folder: Path, **of: Any) -> Path:
    path = folder / "kept.json"
    document = {"costs": COSTS.document(), "deviation": 0.07, "of": {"settings": SETTINGS | of}}
    path.write_text(json.dumps(document))
    return path


def test_a_file_that_an_engine_keeps_has_costs_settings_and_what_was_measured(tmp_path: Path) -> None:
    machine = read_machine(kept(tmp_path))
    assert (machine.costs, machine.deviation, machine.is_gpu) == (COSTS, 0.07, False)
    assert machine.measured.tokens == 256
    assert machine.measured.samples == 16
    assert machine.measured.keys >= 256 + 2048 - 1
    assert read_machine(kept(tmp_path, device="NVIDIA H200")).is_gpu


def test_a_file_of_an_earlier_release_says_only_how_many_tokens_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({"costs": COSTS.document(), "deviation": 0.07}))
    assert read_machine(path).measured == StepWork(100, *[NO_LIMIT] * 5)
    with pytest.raises(ValueError, match=r"kept.json does not say how many tokens the KV cache holds: .* --kv-tokens"):
        engine_of(read_machine(path), EngineConfig(), kv_tokens=None, max_model_len=None)


@pytest.mark.parametrize("name", ["step_model.json", "engine_step_vectors.json", "gpu.json"])
def test_results_of_benchmarks_are_read_as_the_simulator_reads_them(name: str) -> None:
    machine = read_machine(RESULTS / name)
    steps, _ = measured(RESULTS / name)
    for plan in (step(4, 200), step(0, 1, chunk=64)):
        assert machine.costs.seconds(work_of(plan)) == pytest.approx(steps.seconds(plan), rel=0.2)
    assert machine.is_gpu == (name == "gpu.json")
    assert 0 < machine.measured.tokens < NO_LIMIT


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"benchmark": "peers"}', '{"costs": {}, "deviation": 1}', '{"costs": 1, "deviation": 1}'),
        *('{"benchmark": "engine_step", "cells": [1]}', '{"benchmark": "engine_step", "cells": {"a": {}}}', "[" * 5000),
        *('{"of": [1], "costs": 1, "deviation": 1}', '{"config": {"max_num_seqs": []}, "of": {}}'),
        json.dumps({"costs": COSTS.document() | {"knots": [1, math.inf]}, "deviation": 0.1}),
    ],
)
def test_what_holds_no_step_times_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        read_machine(path)


def test_what_is_beyond_the_measured_steps_is_noticed() -> None:
    machine = Machine("m", COSTS, 0.05, decode_work(8, 1000))
    steps = WatchedSteps(machine, slowness=2.0)
    inside, outside = step(8, 500), step(9, 500)
    first, second = steps.seconds(inside), steps.seconds(outside)
    assert first == pytest.approx(2 * COSTS.seconds(decode_work(8, 500)))
    assert (steps.total_s, steps.beyond_s) == pytest.approx((first + second, second))


def test_an_engine_holds_what_the_config_says_or_else_what_the_measured_one_held(tmp_path: Path) -> None:
    machine = read_machine(kept(tmp_path))
    engine = engine_of(machine, EngineConfig(), kv_tokens=None, max_model_len=None)
    assert (engine.kv_tokens, engine.max_model_len, engine.longest) == (16_000, 4096, 4096)
    engine = engine_of(machine, EngineConfig(max_model_len=8192), kv_tokens=5000, max_model_len=None)
    assert (engine.kv_tokens, engine.max_model_len, engine.longest) == (5000, 8192, 5000)
    with pytest.raises(ValueError, match="a KV cache of 3 tokens does not hold a block of 16"):
        engine_of(machine, EngineConfig(), kv_tokens=3, max_model_len=None)


def test_the_size_of_a_tokens_kv_follows_from_the_models_shape() -> None:
    """SmolLM2-135M: 1.37 GiB for 64,000 tokens, as its engine says in step_model.json."""
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_bytes_a_token(shape) == 23_040
    assert 64_000 * kv_bytes_a_token(shape) / 2**30 == pytest.approx(1.37, abs=0.005)
    assert kv_bytes_a_token(shape, "fp8_e4m3") == 11_520
    hybrid = {"text_config": {**shape, "layer_types": ["linear_attention", "full_attention"]}}
    assert kv_bytes_a_token(hybrid) == 768
    with pytest.raises(ValueError, match="does not say the size of its KV cache"):
        kv_bytes_a_token({})
