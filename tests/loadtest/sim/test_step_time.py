"""How long a simulated step takes, derived from measured ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.observer import ComputedStep
from engine.scheduling.step_time import StepCosts, decode_work
from engine.step import RowKind, ScheduledRequest, StepPlan
from loadtest.sim.step_time import (
    ATTENTION_CONTEXT,
    MEASURED,
    CalibratedStep,
    ConstantStep,
    LinearStep,
    fit,
    measured,
)
from loadtest.sim.validation import STEPS

MODEL = LinearStep(step_s=0.01, token_s=0.001, decode_row_s=0.002, attention_context=1000)


COSTS = StepCosts((1, 8, 64), (0.010, 0.012, 0.040), 0.0002, 1e-6, 4e-7, 0.001)


def row(kind: RowKind, start: int, count: int) -> ScheduledRequest:
    return ScheduledRequest("r", kind, start, (1,) * count, (0,), None)


def trace(step: ComputedStep) -> None:
    logging.getLogger("engine").info("%s", step.line)


def cell(step: str, size: int, ms: float, context: int = 200) -> dict[str, Any]:
    return {"step": step, "size": size, "context": context, "kernels": "native", "ms_p50": ms}


def step(decodes: int, tokens: int, seconds: float) -> ComputedStep:
    return ComputedStep(7, decodes, (tokens,) if tokens else (), decodes + tokens, 0, seconds)


def test_a_step_costs_its_rows_its_tokens_and_what_they_attend_to() -> None:
    plan = StepPlan(0, (row(RowKind.DECODE, 500, 1), row(RowKind.MIDDLE, 100, 40)))
    attended = 500.5 + 40 * 120
    assert MODEL.seconds(plan) == pytest.approx(0.01 + 0.002 + 0.001 * (40 + attended / 1000))


def test_a_last_chunk_of_one_token_is_no_decode_row() -> None:
    assert MODEL.seconds(StepPlan(0, (row(RowKind.LAST, 0, 1),))) == pytest.approx(0.011, rel=1e-3)


def test_a_constant_step_takes_the_same_whatever_it_computes() -> None:
    assert ConstantStep(0.5).seconds(StepPlan(0, (row(RowKind.MIDDLE, 0, 500),))) == 0.5


def test_a_faster_machine_does_all_of_it_in_a_fraction() -> None:
    plan = StepPlan(0, (row(RowKind.DECODE, 500, 1), row(RowKind.MIDDLE, 100, 40)))
    assert MODEL.faster(4).seconds(plan) == pytest.approx(MODEL.seconds(plan) / 4)


def test_the_fit_finds_the_model_that_made_the_measurements() -> None:
    work = [(1, 0), (8, 0), (32, 0), (0, 64), (0, 256)]
    cells = []
    for rows, tokens in work:
        attended = rows * 200 + tokens * (200 + tokens / 2)
        ms = 15 + 2 * rows + 1.5 * (tokens + attended / ATTENTION_CONTEXT)
        cells.append(cell("decode", rows, ms) if rows else cell("prefill", tokens, ms))
    model, error = fit(cells)
    assert (model.step_s, model.token_s, model.decode_row_s) == pytest.approx((0.015, 0.0015, 0.002))
    assert error < 1e-9


def test_measurements_that_no_linear_model_could_make_are_refused() -> None:
    cells = [cell("decode", 1, 50), cell("decode", 32, 10), cell("prefill", 64, 10), cell("prefill", 256, 400)]
    with pytest.raises(ValueError, match="not positive"):
        fit(cells)


def test_a_servers_log_of_its_steps_is_as_good_as_a_bench(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The lines are as the engine writes them: steps of each kind are now shorter and now longer than their mean, and
    two kinds were too rare to have one."""
    caplog.set_level("INFO")
    kinds = [(decodes, tokens) for decodes in (0, 1, 5, 9) for tokens in (0, 17, 128) if decodes or tokens]
    for decodes, tokens in kinds:
        for off in (0.5, 1.5) * 5:
            trace(step(decodes, tokens, off * (0.01 + 0.002 * decodes + 0.001 * tokens)))
    trace(step(3, 0, 9.9))
    trace(step(2, 300, 9.9))
    path = tmp_path / "serve.log"
    path.write_text("\n".join(["no step", *(f"(Engine pid=1) INFO {line}" for line in caplog.messages)]))
    model, error = measured(path)
    assert (model.step_s, model.decode_row_s, model.token_s) == pytest.approx((0.01, 0.002, 0.001), rel=1e-3)
    assert error < 1e-3
    path.write_text("\n".join(caplog.messages[:20]))
    with pytest.raises(ValueError, match="2 kinds of steps"):
        measured(path)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "is not a result of benchmarks.engine.step with cells: its benchmark is None"),
        ({"benchmark": "engine_step", "cells": []}, "is not a result of benchmarks.engine.step with cells"),
        ({"benchmark": "mixed_load", "cells": [{"budget": 128}]}, "its benchmark is mixed_load"),
        (
            {
                "benchmark": "first_hour",
                "cells": [{"model": "llama-3.1-8b", "cell": "steps", "failed": "no memory"}],
                "attention": [{"shape": "decode 1 x 8192", "by": "triton", "us": 1.0}],
            },
            "0 steps of up to 0 tokens are too few",
        ),
        (
            {"benchmark": "engine_step", "cells": [cell("decode", 1, 20.0), cell("decode", 8, 30.0)]},
            "2 kinds of steps were measured",
        ),
    ],
)
def test_a_file_that_cannot_say_how_long_steps_take_is_refused(document: object, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=reason):
        measured(path)


@pytest.mark.parametrize("path", [MEASURED, STEPS])
def test_the_recorded_steps_are_described_to_a_quarter(path: Path) -> None:
    model, error = measured(path)
    assert error < 0.25
    assert model.token_s < model.decode_row_s < model.step_s


def test_the_engines_own_model_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"benchmark": "step_model", "costs": COSTS.document(), "deviation": 0.07}))
    model, error = measured(path)
    assert (model, error) == (CalibratedStep(COSTS), 0.07)
    plan = StepPlan(0, (row(RowKind.DECODE, 499, 1), row(RowKind.MIDDLE, 100, 35)))
    attended = 500 + 35 * 100 + 35 * 36 / 2
    assert model.seconds(plan) == pytest.approx(0.026 + 0.0002 + 1e-6 * (500 + 135) + 4e-7 * attended)
    assert model.faster(4).seconds(plan) == pytest.approx(model.seconds(plan) / 4)
    assert model.prefill_tokens_per_s == pytest.approx(2000)
    assert model.faster(2).prefill_tokens_per_s == pytest.approx(4000)


def test_a_file_whose_model_has_no_costs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"benchmark": "step_model", "costs": {"knots": [1]}, "deviation": 0.07}))
    with pytest.raises(ValueError, match="these are no step costs"):
        measured(path)


def test_steps_of_a_gpu_can_be_simulated() -> None:
    """Decodes are bound by what they read, and prompts by arithmetic: 64 rows cost little more than one."""
    path = MEASURED.with_name("gpu.json")
    model, error = measured(path)
    assert error < 0.02, "as docs/benchmarks/gpu.md says"
    assert isinstance(model, CalibratedStep)
    one, many = (model.costs.seconds(decode_work(rows, 1024)) for rows in (1, 64))
    assert one < many < 2 * one
    assert model.costs.seconds(decode_work(64, 8192)) > 2 * many, "what each row reads counts, too"
    assert 10_000 < model.prefill_tokens_per_s < 100_000
