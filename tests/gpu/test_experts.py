"""Owns the comparison of Triton's mixtures of experts on a GPU with the reference, in edge cases and real shapes.
Never compares with stored numbers: inputs are random."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from engine.execution.device import Device
from kernels import reference
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import Ops
from kernels.forward import Routing
from tests.kernels.experts_case import ExpertsCase, experts_case
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
def test_a_token_gets_the_same_bits_alone_and_among_others(device: Device, table: Ops, shape: str) -> None:
    case, routing = case_of(shape, 200, torch.bfloat16)
    x, *weights = case.to(device.torch_device)
    whole = table.experts(x, *weights, routing)
    for token in (0, 63, 199):
        assert torch.equal(table.experts(x[token : token + 1], *weights, routing)[0], whole[token])


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
