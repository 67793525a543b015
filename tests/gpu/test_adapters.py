"""Owns the tests of LoRA adapters on a GPU: captured steps, and slots that change while a step is in flight.
Never needs a checkpoint or an adapter's files: weights are dummies of real shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.models
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.execution.device import Device
from engine.execution.gpu.adapters import AdapterSlots
from engine.execution.gpu.executor import DeviceExecutor
from engine.step import ScheduledRequest, StepPlan
from tests.support.distances import is_within
from tests.support.plans import chunk, decode

pytest.importorskip("triton", reason="adapters on a GPU need Triton")

pytestmark = pytest.mark.gpu

SHAPES = Path(engine.models.__file__).parent / "shapes"
TOKENS = torch.randint(0, 151936, (3, 64), generator=torch.Generator().manual_seed(5)).tolist()
TABLES = ((9, 3, 4, 10), (1, 2, 5, 11), (6, 7, 8, 12))
MIXED = (("a", "", "b"), ("b", "a", "a"), ("", "b", ""))
"""The adapters of three rows."""


@pytest.fixture(params=["all", "none"])
def executor(request: pytest.FixtureRequest, device: Device) -> Iterator[DeviceExecutor]:
    """Make an executor with two slots, filled with `a` and `b`."""
    settings: dict[str, Any] = {
        "load_format": "dummy", "device": "cuda", "attention": "triton", "max_model_len": 64, "num_kv_blocks": 16,
        "max_num_seqs": 3, "max_num_batched_tokens": 64, "cuda_graphs": request.param, "max_loras": 2,
        "num_speculative_tokens": 0,
    }  # fmt: skip
    made, _ = create_executor(SHAPES / "qwen3-0.6b", EngineConfig(**settings))
    assert isinstance(made, DeviceExecutor)
    for number, name in enumerate("ab"):
        slots_of(made).keep(name, weights(made, number))
    yield made
    made.shutdown()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def slots_of(executor: DeviceExecutor) -> AdapterSlots:
    slots = executor.model.adapters
    assert slots is not None
    return slots


def weights(executor: DeviceExecutor, seed: int) -> Tensor:
    """Return what a slot holds of a random adapter that changes every matrix. # [size]"""
    slots = slots_of(executor)
    dtype = executor.model.decoder.dtype
    size = slots.num_bytes // slots.num_slots // dtype.itemsize
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


def logits(executor: DeviceExecutor, *rows: ScheduledRequest) -> Tensor:
    """Return the logits of the step's tokens, captured or not as a launched step is. # [num_tokens, vocab]"""
    computed, _ = executor.model.start(StepPlan(0, rows), {}, ())
    every = torch.arange(sum(len(row.token_ids) for row in rows), device=computed.hidden.device)
    return computed.logits_at(every).float().cpu().clone()


def steps(executor: DeviceExecutor, adapters: tuple[str, ...]) -> Tensor:
    """Return logits of a step of three chunks, a mixed step and a decode step."""
    found = []
    for begin, count in ((0, 10), (10, 1), (11, 1)):
        rows = [
            chunk(f"{n}", TOKENS[n], begin, begin + count, TABLES[n])
            if begin == 0
            else decode(f"{n}", TOKENS[n][begin], begin, TABLES[n])
            for n in range(3)
        ]
        if begin == 10:
            rows[2] = chunk("2", TOKENS[2], 10, 11, TABLES[2])
        rows = [row._replace(adapter=adapter) for row, adapter in zip(rows, adapters, strict=True)]
        with torch.inference_mode():
            found.append(logits(executor, *rows))
    return torch.cat(found)


@pytest.mark.parametrize("adapters", MIXED, ids=str)
def test_a_row_is_what_it_is_with_its_adapter_for_all(executor: DeviceExecutor, adapters: tuple[str, ...]) -> None:
    """Rows are at the same places in steps of the same size, so that those without an adapter have the same bits."""
    got = steps(executor, adapters)
    own = [*[row for row in range(3) for _ in range(10)], 0, 1, 2, 0, 1, 2]  # each token's row
    for adapter in {*adapters}:
        want = steps(executor, (adapter,) * 3)
        tokens = [token for token, row in enumerate(own) if adapters[row] == adapter]
        if adapter:
            assert is_within(float((got - want)[tokens].norm() / want[tokens].norm()), 1e-2)
            assert (got - steps(executor, ("", "", "")))[tokens].norm() > 0.1 * want[tokens].norm()
        else:
            assert torch.equal(got[tokens], want[tokens])


def test_a_slot_that_is_filled_anew_while_a_step_is_in_flight_changes_that_step_not(executor: DeviceExecutor) -> None:
    slots, plan = slots_of(executor), chunk("0", TOKENS[0], 0, 60, TABLES[0])
    weights_of_b, weights_of_c = slots._device.staged(weights(executor, 1)), slots._device.staged(weights(executor, 2))
    with torch.inference_mode():
        want = [logits(executor, plan._replace(adapter="b"))]
        slots.drop("b")
        slots.keep("c", weights_of_c)
        want.append(logits(executor, plan._replace(adapter="c")))
        slots.drop("c")
        slots.keep("b", weights_of_b)
        found = []
        for _ in range(5):
            first, _ = executor.model.start(StepPlan(0, (plan._replace(adapter="b"),)), {}, ())
            hidden = first.hidden.clone()
            slots.drop("b")
            slots.keep("c", weights_of_c)
            second, _ = executor.model.start(StepPlan(1, (plan._replace(adapter="c"),)), {}, ())
            slots.drop("c")
            slots.keep("b", weights_of_b)
            found.append((hidden, second.hidden.clone()))
        head = executor.model.decoder.weights.lm_head.weight
        for hidden, other in found:
            for got, expected in zip((hidden, other), want, strict=True):
                logits_of = torch.nn.functional.linear(got, head).float().cpu()
                assert is_within(float((logits_of - expected).norm() / expected.norm()), 1e-2)
    assert (want[0] - want[1]).norm() > 0.1 * want[0].norm()
