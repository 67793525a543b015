"""Owns the comparison of Triton's norms, activation, rotation and cache writes with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and every output is poisoned first."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.forward import HeadShape
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import (
    EPS,
    TOLERANCE,
    check_norm,
    check_rotation,
    check_silu_and_mul,
    check_write_cache,
    close,
    poisoned,
)

from kernels.triton.elementwise import norm  # isort: skip
from kernels.triton.elementwise.activation import BLOCK, silu_and_mul  # isort: skip
from kernels.triton.elementwise.rotate import HEADS_AT_A_TIME, rope  # isort: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 64, 576, 1025])
def test_the_norm_with_its_residual_matches_the_reference(device: str, size: int, dtype: torch.dtype) -> None:
    check_norm(size, dtype, device)


def test_the_first_norm_of_a_model_needs_no_residual(device: str) -> None:
    x, weight = torch.randn(3, 64, generator=seeded_generator()).half(), torch.ones(64)
    normed, total = norm.add_rms_norm(x.to(device), None, weight.to(device), EPS)
    close(normed, reference.rms_norm(x, weight, EPS))
    assert torch.equal(total.cpu(), x.float())


def test_the_sum_may_replace_the_residual(device: str) -> None:
    generator = seeded_generator()
    x, residual, weight = (torch.randn(shape, generator=generator) for shape in ((3, 64), (3, 64), (64,)))
    total = residual.clone().to(device)
    normed, _ = norm.add_rms_norm(x.to(device), total, weight.to(device), EPS, out=(torch.empty_like(total), total))
    want = reference.add_rms_norm(x, residual, weight, EPS)
    close(normed, want[0])
    close(total, want[1])


def test_the_residual_stream_stays_in_float32(device: str) -> None:
    x = torch.full((1, 64), 2.0**-9, dtype=torch.bfloat16, device=device)
    total = torch.ones(1, 64, device=device)
    for _ in range(4):
        _, total = norm.add_rms_norm(x, total, torch.ones(64, dtype=torch.bfloat16, device=device), EPS)
    assert float(total[0, 0]) == 1 + 4 * 2.0**-9, "each addend is below half a bfloat16 step at 1, and would vanish"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_matches_the_reference_on_a_view_of_stacked_heads(device: str, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x = (torch.randn(4, 5, 48, generator=generator) * 5).to(dtype)
    weight = torch.rand(48, generator=generator).to(dtype)
    close(norm.rms_norm(x.to(device)[:, 1:4], weight.to(device), EPS), reference.rms_norm(x[:, 1:4], weight, EPS))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_silu_and_mul_matches_the_reference(device: str, size: int, dtype: torch.dtype) -> None:
    check_silu_and_mul(size, dtype, device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_rope_matches_the_reference_on_a_view_of_stacked_heads(device: str, head_dim: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x = torch.randn(4, 5, head_dim, generator=generator).to(dtype)
    angles = torch.rand(4, head_dim // 2, generator=generator) * 100
    cos, sin = angles.cos(), angles.sin()
    out = poisoned((4, 3, head_dim), dtype, device)
    assert rope(x.to(device)[:, 1:4], cos.to(device), sin.to(device), out=out) is out
    close(out, reference.rope(x[:, 1:4], cos, sin))


@pytest.mark.parametrize(
    ("normed", "dtype"), [*((False, dtype) for dtype in TOLERANCE), (True, torch.float32), (True, torch.float16)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_the_fused_rotation_and_write_match_the_references_operations(
    device: str, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """The reference rounds between norm and rotation, the launch does not; in bfloat16 that exceeds the tolerance."""
    check_rotation(HeadShape(num_heads=6, num_kv_heads=2, head_dim=head_dim), device, dtype=dtype, normed=normed)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (HEADS_AT_A_TIME, 1), (HEADS_AT_A_TIME - 2, 1), (40, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_any_number_of_heads_and_tokens_matches_the_reference(device: str, heads: tuple[int, int], tokens: int) -> None:
    """One tile of heads may hold queries, keys and values."""
    shape = HeadShape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=8)
    check_rotation(shape, device, tokens=tokens, normed=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_write_cache_touches_no_other_slot_and_none_for_padding(device: str, dtype: torch.dtype) -> None:
    check_write_cache(dtype, device)


def test_no_tokens_are_no_launch(device: str) -> None:
    none = torch.empty(0, 4, 64, device=device)
    assert norm.rms_norm(none, torch.ones(64, device=device), EPS).shape == none.shape
    assert rope(none, none[:, 0, :32], none[:, 0, :32]).shape == none.shape
    assert silu_and_mul(none[:, 0]).shape == (0, 32)
