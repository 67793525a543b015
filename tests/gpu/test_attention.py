"""Owns the comparison of each backend's attention on a GPU with float64, at the edges, as the engine calls it.
Never compares with stored numbers: inputs are fresh, and slots that no row owns hold NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.device import Device
from kernels.choice import ATTENTION, choose_attention
from kernels.paged import on_device
from tests.kernels.rows import Case, paged_case

pytestmark = pytest.mark.gpu

STEPS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode only": ([0, 14, 15, 16, 255, 256, 3000], []),
    "mixed": ([5, 700, 31], [(0, 17), (33, 2), (500, 130)]),
    "one-token last chunk": ([], [(16, 1)]),
    "one-token last chunk beside a decode": ([7], [(20, 1)]),
    "whole prompts": ([], [(0, 1), (0, 128), (0, 129), (0, 513)]),
}
SHAPES = {"llama-3.1-8b": (8, 4, 128), "qwen3-0.6b": (8, 2, 128), "qwen3-32b": (8, 8, 128), "smollm2": (3, 3, 64)}
"""(KV heads, query heads of each, head_dim)"""
BFLOAT16_ERROR = 1e-2
"""Of the whole, by norm: bfloat16 keeps 8 bits, and an error of the arithmetic's order is several times less."""


def exact(case: Case) -> Tensor:
    """In float64, on the CPU, from the same rounded inputs."""
    out, first = torch.empty(case.q.shape, dtype=torch.float64), 0
    for row, (context, count) in enumerate(zip(case.rows.contexts, case.rows.counts, strict=True)):
        slots = case.rows.slots(row)
        group = case.q.shape[1] // case.k_cache.shape[2]
        k, v = (
            cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1)
            for cache in (case.k_cache, case.v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", case.q[first : first + count].double(), k) * case.scale
        future = torch.arange(context + count) > context + torch.arange(count).unsqueeze(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, v)
        first += count
    return out


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ATTENTION)
def test_a_backend_agrees_with_float64_at_the_edges(device: Device, name: str, shape: str, step: str) -> None:
    kv_heads, group, head_dim = SHAPES[shape]
    try:
        _, ops = choose_attention(
            name, dtype=torch.bfloat16, head_dim=head_dim, block_size=16, capability=device.capability
        )
    except ValueError as error:
        pytest.skip(str(error))
    case = paged_case(*STEPS[step], kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=torch.bfloat16)
    there = device.torch_device
    rows = on_device(case.rows, there)
    plan = ops.prepare_attention(rows, kv_heads, torch.bfloat16)
    got = ops.attention(case.q.to(there), case.k_cache.to(there), case.v_cache.to(there), plan, case.scale)
    want = exact(case)
    error = (got.cpu().double() - want).norm() / want.norm()
    assert error < BFLOAT16_ERROR, "NaN, too, is no agreement"
