"""Owns the comparison of Triton's mixtures of experts on a GPU with the reference, in edge cases and real shapes.
Never compares with stored numbers: inputs are random."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from engine.execution.device import Device
from kernels import reference
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import Ops
from kernels.forward import Linear, Routing
from tests.kernels.experts_case import ExpertsCase, experts_case
from tests.kernels.narrow_case import narrow_experts_case
from tests.support.distances import assert_close

pytestmark = pytest.mark.gpu

SHAPES = {
    "qwen3-30b-a3b": (128, 2048, 768, Routing(8, renormalize=True)),
    "mixtral": (8, 1024, 3584, Routing(2, renormalize=True)),  # a quarter of 8x7b's sizes: the reference is slow
    "odd": (5, 72, 40, Routing(3, renormalize=False)),
}
"""(experts, hidden size, intermediate size, routing)"""
TOKENS = (1, 17, 64, 130)


@pytest.fixture
def table(device: Device) -> Ops:
    found: Ops = import_module(TRITON_TABLE).TRITON
    return found


def case_of(shape: str, tokens: int, dtype: torch.dtype) -> tuple[ExpertsCase, Routing]:
    num_experts, hidden, size, routing = SHAPES[shape]
    return experts_case(tokens, num_experts, hidden=hidden, size=size, dtype=dtype), routing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_are_those_of_the_reference(
    device: Device, table: Ops, shape: str, tokens: int, dtype: torch.dtype
) -> None:
    case, routing = case_of(shape, tokens, dtype)
    want = reference.experts(*(each.to(device.torch_device) for each in case), routing)
    got = table.experts(*case.to(device.torch_device), routing)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_gets_the_same_bits_beside_any_others_of_its_launch(device: Device, table: Ops, shape: str) -> None:
    num_experts, routing = SHAPES[shape][0], SHAPES[shape][3]
    assert table.expert_launches is not None
    firsts = table.expert_launches(num_experts, routing)
    case, _ = case_of(shape, 3 * firsts[-1], torch.bfloat16)
    x, *weights = case.to(device.torch_device)
    for least, most in zip(firsts, (*(first - 1 for first in firsts[1:]), len(x)), strict=True):
        whole, few = (table.experts(x[:tokens], *weights, routing) for tokens in (most, least))
        assert torch.equal(few, whole[:least])


@pytest.mark.parametrize("tokens", [1, 40, 1100])
@pytest.mark.parametrize(("kind", "group", "zeros"), [("int8", None, False), ("fp8", 128, False), ("int4", 128, True)])
def test_experts_of_fewer_bits_are_those_of_the_reference(
    device: Device, table: Ops, kind: str, group: int | None, zeros: bool, tokens: int
) -> None:
    """Sixteen experts of the first shape's sizes; of many tokens, the reference takes the first few."""
    _, hidden, size, routing = SHAPES["qwen3-30b-a3b"]
    case = experts_case(tokens, 16, hidden=hidden, size=size, dtype=torch.bfloat16)
    x, router, *_ = case.to(device.torch_device)
    weights = [
        moved(narrow_experts_case(kind, 16, *shape, group=group, zeros=zeros), device)
        for shape in ((2 * size, hidden), (hidden, size))
    ]
    want = reference.narrow_experts(x[:40], router, *weights, routing)
    assert table.narrow is not None
    first, second = (table.narrow.pack(linear) for linear in weights)
    got = table.narrow.experts(x, router, first, second, routing)
    assert_close(got[:40], want, atol=2e-2, rtol=2e-2)


def moved(linear: Linear, device: Device) -> Linear:
    tensors = {name: getattr(linear, name) for name in ("weight", "scales", "zeros")}
    return replace(linear, **{name: x.to(device.torch_device) for name, x in tensors.items() if x is not None})


def test_a_replay_computes_with_what_is_there_then(device: Device, table: Ops) -> None:
    """In each replay, tokens choose other experts, and nothing about them comes from the host."""
    case, routing = case_of("odd", 33, torch.bfloat16)
    x, *weights = case.to(device.torch_device)
    table.experts(x, *weights, routing)  # compiles, and chooses configurations
    graph, place = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = table.experts(place, *weights, routing)
    for tokens in (x.flip(0), -x, x):
        place.copy_(tokens)
        graph.replay()
        assert torch.equal(out, table.experts(tokens, *weights, routing))
