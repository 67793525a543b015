"""Owns the contract of the first launches of matrices that are not packed: each shape in each launch, and no other.
Never needs Triton: launches are recorded, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.execution.gpu.linear_launches import warm_up_linear
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.weights import dummy_weights
from kernels.eager.ops import TORCH, Ops
from kernels.forward import GELU, Linear
from tests.support.tiny_models import VOCAB, save_model

ROWS = (4, 16, 64)
Launch = tuple[str, int, tuple[int, ...]]
"""(operator, rows, the weight's shape)"""


@pytest.fixture
def launched() -> list[Launch]:
    return []


@pytest.fixture
def recording(launched: list[Launch]) -> Ops:
    """Return a table with a kernel for each of ROWS, which records what it multiplies."""

    def by(name: str) -> Callable[[Tensor, Linear], Tensor]:
        def product(x: Tensor, linear: Linear) -> Tensor:
            assert x.dtype == linear.weight.dtype == torch.bfloat16
            assert x.shape[1] == linear.weight.shape[1]
            launched.append((name, len(x), tuple(linear.weight.shape)))
            return x

        return product

    return replace(TORCH, linear=by("linear"), gated_linear=by("gated"), linear_rows=ROWS)


def decoder(kind: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    save_model(kind, directory)
    config = read_model_config(directory)
    return Decoder(config, dummy_weights(config, dtype), 64)


def shapes(model: Decoder, *names: str) -> set[tuple[int, ...]]:
    return {tuple(getattr(layer, name).weight.shape) for layer in model.weights.layers for name in names}


def test_every_shape_and_the_head_are_multiplied_once_in_each_launch(
    tmp_path: Path, recording: Ops, launched: list[Launch]
) -> None:
    model = decoder("llama", tmp_path)
    warm_up_linear(model, recording, 64, adapters=False)
    plain = {*shapes(model, "qkv", "output", "down"), (VOCAB, model.config.hidden_size)}
    wanted = [("linear", shape) for shape in plain] + [("gated", shape) for shape in shapes(model, "gate_up")]
    assert sorted(launched) == sorted((name, rows, shape) for name, shape in wanted for rows in ROWS)


def test_gate_and_up_are_also_multiplied_alone_where_rows_may_have_adapters(
    tmp_path: Path, recording: Ops, launched: list[Launch]
) -> None:
    model = decoder("llama", tmp_path)
    warm_up_linear(model, recording, 64, adapters=True)
    (gate_up,) = shapes(model, "gate_up")
    assert {name for name, _, shape in launched if shape == gate_up} == {"linear", "gated"}


def test_another_activation_is_never_fused(tmp_path: Path, recording: Ops, launched: list[Launch]) -> None:
    model = decoder("llama", tmp_path)
    model.config = replace(model.config, activation=GELU)
    warm_up_linear(model, recording, 64, adapters=False)
    (gate_up,) = shapes(model, "gate_up")
    assert {name for name, _, shape in launched} == {"linear"}
    assert gate_up in {shape for _, _, shape in launched}


@pytest.mark.parametrize(("most", "rows"), [(64, {4, 16, 64}), (63, {4, 16, 63}), (3, {3})])
def test_no_launch_has_more_rows_than_a_step_and_the_largest_step_has_its_own(
    most: int, rows: set[int], tmp_path: Path, recording: Ops, launched: list[Launch]
) -> None:
    """Regression guard: with 63 tokens a step, the launch for 17 to 64 rows was first met within a capture."""
    warm_up_linear(decoder("llama", tmp_path), recording, most, adapters=False)
    assert {count for _, count, _ in launched} == rows


def test_experts_and_packed_matrices_are_left_to_their_own_launches(
    tmp_path: Path, recording: Ops, launched: list[Launch]
) -> None:
    model = decoder("qwen3_moe", tmp_path)
    first, *rest = model.weights.layers
    packed = replace(first, output=Linear(object()))
    model.weights = replace(model.weights, layers=(packed, *rest))
    warm_up_linear(model, recording, 64, adapters=False)
    assert launched
    assert {len(shape) for _, _, shape in launched} == {2}


def test_tables_that_leave_products_to_torch_launch_nothing(
    tmp_path: Path, recording: Ops, launched: list[Launch]
) -> None:
    warm_up_linear(decoder("llama", tmp_path), replace(recording, linear=None), 64, adapters=False)
    assert launched == []
