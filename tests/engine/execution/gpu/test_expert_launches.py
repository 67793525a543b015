"""Owns the contract of the first launches of experts: each kind of mixture in each launch, and no larger than a step.
Never needs Triton: launches are recorded, and nothing is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.execution.gpu.expert_launches import warm_up_experts
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.weights import dummy_weights
from kernels.eager.ops import TORCH, Ops
from kernels.forward import Routing
from tests.support.tiny_models import save_model

FIRSTS = (1, 9, 65)


@pytest.fixture
def launched() -> list[Tensor]:
    return []


@pytest.fixture
def recording(launched: list[Tensor]) -> Ops:
    """Return a table with a kernel for each of FIRSTS, which records its inputs."""

    def experts(x: Tensor, *_: Any) -> Tensor:
        launched.append(x)
        return x

    def firsts(num_experts: int, routing: Routing) -> tuple[int, ...]:
        assert (num_experts, routing.per_token) == (6, 2)
        return FIRSTS

    return replace(TORCH, experts=experts, expert_launches=firsts)


def decoder(kind: str, directory: Path) -> Decoder:
    save_model(kind, directory)
    config = read_model_config(directory)
    return Decoder(config, dummy_weights(config, torch.bfloat16), 64)


def test_layers_alike_are_launched_once_with_the_first_tokens_of_each_launch(
    tmp_path: Path, recording: Ops, launched: list[Tensor]
) -> None:
    warm_up_experts(decoder("qwen3_moe", tmp_path), recording, 100)
    assert [tuple(x.shape) for x in launched] == [(tokens, 48) for tokens in FIRSTS]
    assert {x.dtype for x in launched} == {torch.bfloat16}
    assert launched[-1].unique(dim=0).shape == launched[-1].shape, "tokens alike would choose the same experts"


@pytest.mark.parametrize(("most", "count"), [(64, 2), (8, 1), (65, 3)])
def test_no_launch_has_more_tokens_than_a_step(
    most: int, count: int, tmp_path: Path, recording: Ops, launched: list[Tensor]
) -> None:
    warm_up_experts(decoder("qwen3_moe", tmp_path), recording, most)
    assert len(launched) == count


def test_layers_of_another_layout_are_launched_too(tmp_path: Path, recording: Ops, launched: list[Tensor]) -> None:
    model = decoder("qwen3_moe", tmp_path)
    first, *rest = model.weights.layers
    wider = replace(first, gate_up=replace(first.gate_up, weight=first.gate_up.weight.float()))
    model.weights = replace(model.weights, layers=(wider, *rest))
    warm_up_experts(model, recording, 100)
    assert len(launched) == 2 * len(FIRSTS)


def test_models_without_experts_and_tables_that_compile_nothing_launch_nothing(
    tmp_path: Path, recording: Ops, launched: list[Tensor]
) -> None:
    warm_up_experts(decoder("llama", tmp_path / "dense"), recording, 100)
    warm_up_experts(decoder("qwen3_moe", tmp_path / "moe"), replace(recording, expert_launches=None), 100)
    assert launched == []
