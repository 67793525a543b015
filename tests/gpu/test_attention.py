"""Owns the comparison of each backend's attention on a GPU with float64, in edge cases, called as the engine does.
Never compares with stored numbers: inputs are random, and slots that no row owns hold NaN."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.execution.device import Device
from kernels.choice import FLASH, TORCH_ATTENTION, TRITON, choose_attention
from kernels.eager.ops import Ops
from kernels.flash.packages import PACKAGES
from kernels.rows.device import on_device
from tests.kernels.rows import Case, paged_case
from tests.support.distances import is_within

pytestmark = pytest.mark.gpu

STEPS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode only": ([0, 14, 15, 16, 255, 256, 3000], []),
    "mixed": ([5, 700, 31], [(0, 17), (33, 2), (500, 130)]),
    "one-token last chunk": ([], [(16, 1)]),
    "one-token last chunk beside a decode": ([7], [(20, 1)]),
    "short chunks after long contexts": ([], [(2950, 50), (1500, 5)]),
    "whole prompts": ([], [(0, 1), (0, 128), (0, 129), (0, 513)]),
}
SHAPES = {"llama-3.1-8b": (8, 4, 128), "qwen3-0.6b": (8, 2, 128), "qwen3-32b": (8, 8, 128), "smollm2": (3, 3, 64)}
"""(KV heads, query heads per KV head, head_dim)"""
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Norm of the error relative to that of the result. bfloat16 keeps 8 bits, and errors from the order of summation are
several times smaller."""
BLOCK_SIZE = 16
BACKENDS = (TRITON, TORCH_ATTENTION, *(package.module for package in PACKAGES))
HEAD_SIZES = (64, 80, 96, 128, 256)
SIZES = [
    (backend, dtype, head_dim)
    for backend in BACKENDS
    for dtype in ERROR
    for head_dim in HEAD_SIZES
    if (backend, dtype) != (TRITON, torch.float32) or head_dim == HEAD_SIZES[0]
]
"""Triton unrolls float32 products: of one size, chunks compile for 8 s, of others for 30 to 80. What a size changes
beside that, 16 bits show."""


def choose(device: Device, backend: str, dtype: torch.dtype, head_dim: int) -> tuple[Ops, int]:
    """Return a backend's table, and a block size that it takes. Of the FlashAttention packages, consider only this one.
    Skip the test if it cannot run."""
    package = next((each for each in PACKAGES if each.module == backend), None)

    def load(module: str) -> Any:
        if package is not None and module in {each.module for each in PACKAGES} - {package.module}:
            raise ImportError(f"this case is of {package.module}")
        return importlib.import_module(module)

    block_size = BLOCK_SIZE if package is None else max(BLOCK_SIZE, package.block_multiple)
    try:
        _, ops = choose_attention(
            backend if package is None else FLASH,
            dtype=dtype,
            head_dim=head_dim,
            block_size=block_size,
            capability=device.capability,
            load=load,
        )
    except ValueError as error:
        pytest.skip(str(error))
    assert package is None or ops.name == package.module
    return ops, block_size


def exact(case: Case, window: int | None = None) -> Tensor:
    """Compute attention in float64, on the CPU, from the same rounded inputs."""
    out, first = torch.empty(case.q.shape, dtype=torch.float64), 0
    for row, (context, count) in enumerate(zip(case.rows.contexts, case.rows.counts, strict=True)):
        slots = case.rows.slots(row)
        group = case.q.shape[1] // case.k_cache.shape[2]
        k, v = (
            cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1)
            for cache in (case.k_cache, case.v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", case.q[first : first + count].double(), k) * case.scale
        behind = context + torch.arange(count).unsqueeze(1) - torch.arange(context + count)  # [count, keys]
        unseen = (behind < 0) | (behind >= (window or context + count))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, v)
        first += count
    return out


def check(device: Device, ops: Ops, case: Case, window: int | None = None) -> None:
    there, kv_heads = device.torch_device, case.k_cache.shape[2]
    plan = ops.prepare_attention(on_device(case.rows, there), kv_heads, case.q.dtype)
    tensors = (each.to(there) for each in (case.q, case.k_cache, case.v_cache))
    got = ops.attention(*tensors, plan, case.scale, window=window)
    want = exact(case, window)
    error = float((got.cpu().double() - want).norm() / want.norm())
    assert is_within(error, ERROR[case.q.dtype]), f"{error:.1e}: NaN, too, is no agreement"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_agrees_with_float64_at_the_edges(
    device: Device, backend: str, dtype: torch.dtype, shape: str, step: str
) -> None:
    kv_heads, group, head_dim = SHAPES[shape]
    ops, block_size = choose(device, backend, dtype, head_dim)
    sizes = {"block_size": block_size, "kv_heads": kv_heads, "group": group, "head_dim": head_dim}
    check(device, ops, paged_case(*STEPS[step], **sizes, dtype=dtype))


@pytest.mark.parametrize("step", ["decode only", "mixed"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("backend", "dtype", "head_dim"), SIZES)
def test_every_head_size_and_window_agrees_with_float64(
    device: Device, backend: str, dtype: torch.dtype, head_dim: int, window: int | None, step: str
) -> None:
    """A long row's first keys are outside its window; in a chunk, each token has a window of its own."""
    ops, block_size = choose(device, backend, dtype, head_dim)
    check(device, ops, paged_case(*STEPS[step], block_size=block_size, head_dim=head_dim, dtype=dtype), window)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("block_size", [64, 128])
def test_blocks_that_hold_whole_tiles_of_keys_agree_with_float64(
    device: Device, block_size: int, window: int | None, step: str
) -> None:
    """config.gpu.yaml has blocks of 64: a tile of keys in one block is read by one entry of its table."""
    kv_heads, group, head_dim = SHAPES["llama-3.1-8b"]
    ops, _ = choose(device, TRITON, torch.bfloat16, head_dim)
    sizes = {"block_size": block_size, "kv_heads": kv_heads, "group": group, "head_dim": head_dim}
    check(device, ops, paged_case(*STEPS[step], **sizes, dtype=torch.bfloat16), window)


def test_decodes_take_a_configuration_that_fits_where_the_first_does_not(device: Device) -> None:
    """Regression guard: in float32, the first one of the largest heads needs 277 KiB of shared memory."""
    ops, block_size = choose(device, TRITON, torch.float32, HEAD_SIZES[-1])
    check(device, ops, paged_case(*STEPS["decode only"], block_size=block_size, head_dim=HEAD_SIZES[-1]))
