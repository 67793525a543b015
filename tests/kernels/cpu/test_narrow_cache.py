"""Owns the comparison of attention over 8-bit K and V with the reference over the same values, rounded in float64.
Never compares with stored numbers: every input is random, and slots that no row owns are poisoned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.narrow_cache import narrow, widen
from kernels.eager.ops import TORCH_CPU
from kernels.kv_format import LARGEST, SCALE_BYTES, stored_size
from tests.kernels.rows import Case, paged_case, seeded_generator

NARROW = [torch.int8, torch.float8_e4m3fn]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def stored(case: Case, kept_in: torch.dtype) -> tuple[Tensor, Tensor]:
    """Write the case's caches a few tokens at a time. Slots that no row owns keep a scale of NaN."""
    caches = []
    for whole in (case.k_cache, case.v_cache):
        *shape, head_dim = whole.shape
        cache = torch.full((*shape, stored_size(head_dim, kept_in)), -1, dtype=torch.int8).view(kept_in)
        slots = (~whole.isnan().any(dim=(2, 3)).flatten()).nonzero().flatten()
        written = whole.flatten(0, 1)[slots]
        for slot, x in zip(slots.split(5), written.split(5), strict=True):
            TORCH_CPU.write_cache(x, x, cache, cache.clone(), slot)
        caches.append(cache)
    return caches[0], caches[1]


def check(case: Case, kept_in: torch.dtype, window: int | None = None) -> None:
    k, v = stored(case, kept_in)
    plan = TORCH_CPU.prepare_attention(case.rows, k.shape[2], case.q.dtype)
    got = TORCH_CPU.attention(case.q, k, v, plan, case.scale, window=window)
    rounded = [rounded_but_for_ties(*pair, kept_in) for pair in ((case.k_cache, k), (case.v_cache, v))]
    want = reference.attention(case.q, rounded[0], rounded[1], case.rows, case.scale, window=window)
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, atol=TOLERANCE[case.q.dtype], rtol=TOLERANCE[case.q.dtype])


def rounded_but_for_ties(whole: Tensor, cache: Tensor, kept_in: torch.dtype) -> Tensor:
    """Return what a cache keeps of `whole`, after checking it against the reference: one or two values in a thousand
    lie halfway between two others, where float32 and float64 round differently."""
    kept, want = widen(cache, kept_in, torch.float64), reference.round_token(whole, kept_in)
    owned = ~want.isnan()
    apart = (kept[owned] - want[owned]).abs() > 1e-6 * want[owned].abs()
    assert apart.double().mean() < 5e-3
    assert kept[~owned].isnan().all()
    return kept.to(whole.dtype)


@pytest.mark.parametrize("kept_in", NARROW)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_matches_the_reference_over_rounded_keys_and_values(
    dtype: torch.dtype, kept_in: torch.dtype, window: int | None
) -> None:
    check(paged_case([0, 14, 15, 16, 300], [(0, 1), (7, 33), (16, 16)], dtype=dtype), kept_in, window)


@pytest.mark.parametrize("kept_in", NARROW)
def test_a_number_is_off_by_half_a_unit_at_most_and_the_largest_not_at_all(kept_in: torch.dtype) -> None:
    x = torch.randn(50, 3, 64, generator=seeded_generator()) * torch.logspace(-6, 6, 50)[:, None, None]
    got = widen(narrow(x, kept_in), kept_in, torch.float32)
    largest = x.abs().amax(dim=-1, keepdim=True)
    steps = 254 if kept_in == torch.int8 else 28  # fp8: the largest spacing is 32 of 448, so the error is 16 at most
    assert ((got - x).abs() <= largest / steps * 1.001).all()
    assert (((got - x).abs() / largest)[x.abs() == largest] < 1e-6).all()


@pytest.mark.parametrize("kept_in", NARROW)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(kept_in: torch.dtype) -> None:
    x = torch.zeros(2, 1, 16)
    x[1, 0, 3] = torch.nan
    got = widen(narrow(x, kept_in), kept_in, torch.float32)
    assert (got[0] == 0).all()
    assert got[1].isnan().any()


def test_a_head_takes_a_byte_a_number_and_its_scale() -> None:
    assert [stored_size(64, dtype) for dtype in NARROW] == [64 + SCALE_BYTES] * 2
    assert stored_size(64, torch.bfloat16) == 64
    assert set(LARGEST) == set(NARROW)
