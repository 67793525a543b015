"""Owns the comparison of the CPU's norms, rotation, activation and cache writes with the reference.
Never compares with stored numbers: every input is random."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.eager.ops import REFERENCE, TORCH_CPU, Ops
from tests.kernels.rows import seeded_generator

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bfloat16: two roundings of 2**-8 each
SIZES = [1, 2, 15, 16, 17, 130]


@pytest.fixture
def ops() -> Ops:
    return TORCH_CPU


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", SIZES)
def test_rms_norm_matches_the_reference(ops: Ops, tokens: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x = (torch.randn(tokens, 3, 64, generator=generator) * 5).to(dtype)
    weight = torch.rand(64, generator=generator).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = torch.randn(tokens, 3, 64, generator=generator)
    got, want = (table.add_rms_norm(x, residual, weight, 1e-6) for table in (ops, REFERENCE))
    close(got[0], want[0])
    close(got[1], want[1])


def test_the_residual_stream_stays_in_float32(ops: Ops) -> None:
    """In bfloat16 it was rounded after each of thirty layers, and "What is the capital of France?" lost its answer."""
    x = torch.full((1, 64), 2.0**-9, dtype=torch.bfloat16)
    total = torch.ones(1, 64)
    for _ in range(4):
        _, total = ops.add_rms_norm(x, total, torch.ones(64, dtype=torch.bfloat16), 1e-6)
    assert total.dtype == torch.float32
    assert float(total[0, 0]) == 1 + 4 * 2.0**-9, "each addend is below half a bfloat16 step at 1, and would vanish"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", SIZES)
def test_rope_matches_the_reference_on_a_view_of_stacked_heads(ops: Ops, tokens: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x = torch.randn(tokens, 5, 16, generator=generator).to(dtype)[:, 1:4]
    angles = torch.rand(tokens, 8, generator=generator) * 100
    close(ops.rope(x, angles.cos(), angles.sin()), reference.rope(x, angles.cos(), angles.sin()))


def test_rope_keeps_lengths_and_relative_angles() -> None:
    """The reference itself must have this property: scores depend only on the distance between positions."""
    generator = seeded_generator()
    q, k = torch.randn(2, 1, 1, 16, generator=generator)
    frequencies = torch.rand(8, generator=generator)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        rotated = []
        for x, position in ((q, q_position), (k, k_position)):
            angles = position * frequencies.unsqueeze(0)
            rotated.append(reference.rope(x.unsqueeze(0), angles.cos(), angles.sin()))
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_and_mul_matches_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    x = (torch.randn(17, 130, generator=seeded_generator()) * 4).to(dtype)
    close(ops.silu_and_mul(x.clone()), reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_and_mul_matches_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    x = (torch.randn(17, 130, generator=seeded_generator()) * 4).to(dtype)
    close(ops.gelu_and_mul(x.clone()), reference.gelu_and_mul(x))


def test_the_reference_of_gelu_is_its_approximation_by_tanh() -> None:
    gate = torch.linspace(-9, 9, 50, dtype=torch.float64)
    want = torch.nn.functional.gelu(gate, approximate="tanh")
    got = reference.gelu_and_mul(torch.stack((gate, torch.ones(50, dtype=torch.float64)), dim=1))
    torch.testing.assert_close(got[:, 0], want, atol=1e-5, rtol=1e-5)


def test_a_norm_whose_weight_is_wider_than_its_input_is_not_rounded_to_it(ops: Ops) -> None:
    """Gemma's weight is 1 + w, which bfloat16 would round to 1 where w is small."""
    generator = seeded_generator()
    x = torch.randn(5, 64, generator=generator).bfloat16()
    weight = 1 + torch.rand(64, generator=generator) / 300
    got, want = ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    close(got, want)
    assert got.dtype == torch.bfloat16
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(got.double(), exact, atol=0, rtol=2.0**-8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", SIZES)
def test_write_cache_matches_the_reference_and_touches_no_other_slot(ops: Ops, tokens: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    k = torch.randn(tokens, 2, 8, generator=generator).to(dtype)
    v = torch.randn(tokens, 4, 8, generator=generator).to(dtype)[:, 1:3]
    slots = torch.randperm(10 * 16, generator=generator)[:tokens]
    caches = [[torch.full((10, 16, 2, 8), torch.nan, dtype=dtype) for _ in "kv"] for _ in range(2)]
    ops.write_cache(k, v, *caches[0], slots)
    reference.write_cache(k, v, *caches[1], slots)
    for got, want in zip(*caches, strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
        assert int(got.isnan().sum()) == (160 - tokens) * 16
