"""Owns the comparison of Triton's KV cache in 8 bits with float64 over the same numbers, in the interpreter.
Never relies on slots that no row owns: their scales are NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.forward import HeadShape
from tests.kernels.rows import paged_case, seeded_generator
from tests.kernels.triton.cases import POISON, attend, captured_plan, place, slow, windowed
from tests.kernels.triton.narrow_kv_case import (
    NARROW,
    UNSEEN,
    check_attention,
    check_rotation,
    check_write,
    difficult,
    parts_of,
    stored,
    untouched,
    widened,
)

from kernels.triton.elementwise.cache import write_cache  # isort: skip
from kernels.triton.elementwise.rotate import HEADS_AT_A_TIME, rotate_and_cache  # isort: skip
from kernels.triton.shared import narrow_cache  # isort: skip

BLOCK = 16
SPLIT = 128
KINDS = pytest.mark.parametrize("kept_in", NARROW, ids=["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, slow(torch.bfloat16)])


# --- writing ---------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_are_stored_as_the_cpu_stores_them_to_the_bit(
    device: str, kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    """Vectors of zeros, of the largest and smallest values, and of values halfway between two numbers among them."""
    check_write(kept_in, dtype, device)


@KINDS
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_of_any_size_are_written(device: str, kept_in: torch.dtype, block_size: int) -> None:
    check_write(kept_in, torch.float32, device, block_size=block_size)


@KINDS
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_fused_rotation_rounds_what_the_references_operations_give(
    device: str, kept_in: torch.dtype, head_dim: int, normed: bool
) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    check_rotation(heads, kept_in, device, normed=normed)


@KINDS
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (HEADS_AT_A_TIME, 1), (HEADS_AT_A_TIME - 2, 1), (40, 8)])
def test_the_fused_rotation_rounds_any_number_of_heads(
    device: str, kept_in: torch.dtype, heads: tuple[int, int]
) -> None:
    """One tile of heads may hold queries, keys and values, and another queries alone."""
    shape = HeadShape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=8)
    check_rotation(shape, kept_in, device, tokens=3, normed=True)


@KINDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden_and_spoils_no_other_vector(
    device: str, kept_in: torch.dtype, bad: float
) -> None:
    x = torch.randn(4, 2, 16, generator=seeded_generator())
    x[1, 0, 3] = bad
    for fused in (False, True):
        k, v = (untouched((1, 4, 2, 16), kept_in, device) for _ in "kv")
        slots = torch.arange(4, device=device)
        if fused:
            qkv, angles = torch.cat((x, x, x), dim=1).flatten(1).to(device), torch.zeros(4, 8, device=device)
            shape = HeadShape(num_heads=2, num_kv_heads=2, head_dim=16)
            rotate_and_cache(qkv, (angles + 1, angles), shape, (k, v), slots)
        else:
            write_cache(x.to(device), x.to(device), k, v, slots)
        for cache in (k, v):
            finite = widened(cache)[0].isfinite().all(dim=-1)  # [slots, kv_heads]
            assert not finite[1, 0]
            assert int(finite.sum()) == 7


# --- attention -------------------------------------------------------------------------------------------------------


@KINDS
@DTYPES
def test_decode_rows_of_any_length_match_float64(device: str, kept_in: torch.dtype, dtype: torch.dtype) -> None:
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1]
    case = paged_case([length - 1 for length in lengths], [], kv_heads=1, dtype=dtype)
    check_attention(case, kept_in, device, split=SPLIT)


@KINDS
@pytest.mark.parametrize("context", [0, BLOCK, 100])
def test_chunks_of_any_length_after_any_context_match_float64(device: str, kept_in: torch.dtype, context: int) -> None:
    counts = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 64]
    check_attention(paged_case([], [(context, count) for count in counts], kv_heads=1), kept_in, device)


@KINDS
@DTYPES
def test_mixed_rows_and_chunks_of_several_splits_match_float64(
    device: str, kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    case = paged_case([0, 15, 300], [(0, 20), (17, 1), (515, 20)], kv_heads=1, dtype=dtype)
    check_attention(case, kept_in, device, split=SPLIT)


@KINDS
@pytest.mark.parametrize("window", [1, BLOCK, 100, 5000])
def test_a_sliding_window_matches_float64(device: str, kept_in: torch.dtype, window: int) -> None:
    case = paged_case([0, 15, 16, 300], [(0, 20), (50, 20), (33, 1)], kv_heads=1)
    check_attention(case, kept_in, device, window=window, split=SPLIT)


@KINDS
@pytest.mark.parametrize("head_dim", [64, 80, 128, slow(96), slow(256)])
def test_every_head_size_matches_float64(device: str, kept_in: torch.dtype, head_dim: int) -> None:
    case = paged_case([5, 130], [(0, 9), (33, 2)], head_dim=head_dim, kv_heads=1, dtype=torch.float16)
    check_attention(case, kept_in, device, split=SPLIT)


@KINDS
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 2), (7, 1), (20, 1)])
def test_every_gqa_ratio_matches_float64(device: str, kept_in: torch.dtype, group: int, kv_heads: int) -> None:
    case = paged_case([5, BLOCK], [(0, 9), (33, 23)], group=group, kv_heads=kv_heads)
    check_attention(case, kept_in, device)


@KINDS
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_every_block_size_matches_float64(device: str, kept_in: torch.dtype, block_size: int) -> None:
    case = paged_case([0, 140], [(5, 11)], block_size=block_size)
    check_attention(case, kept_in, device, split=SPLIT)


@KINDS
@DTYPES
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 200.0])
def test_values_of_any_magnitude_keep_their_digits(
    device: str, kept_in: torch.dtype, dtype: torch.dtype, magnitude: float
) -> None:
    """Regression guard for float16: a probability times the scale of small values is too small for it."""
    case = paged_case([40, 200], [(20, 30)], kv_heads=1, dtype=dtype)
    small = replace(case, q=case.q * 0.1, v_cache=(case.v_cache.float() * magnitude).to(dtype))
    narrowed = stored(small, kept_in, device)
    got = attend(narrowed, device).double() / magnitude
    wide = widened(narrowed.k_cache), widened(narrowed.v_cache) / magnitude
    doubles = replace(small, q=small.q.double(), k_cache=wide[0], v_cache=wide[1])
    want = windowed(doubles, UNSEEN)
    assert float((got - want).norm() / want.norm()) < {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_vectors_of_zeros_and_of_extreme_values_give_no_nan(
    device: str, kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    """A scale of 0 divides nothing. Keys and values here are of all magnitudes, beside each other in one row."""
    case = paged_case([30], [(0, 20)], kv_heads=3, group=1, dtype=dtype)
    for cache in (case.k_cache, case.v_cache):
        for row in range(2):
            slots = case.rows.slots(row)
            x = difficult((len(slots), 3, 16), dtype).float()
            cache.flatten(0, 1)[slots] = x.clamp(-10, 10).to(dtype)
    check_attention(replace(case, q=case.q * 0.1), kept_in, device)
    nothing = replace(case, k_cache=case.k_cache * 0, v_cache=case.v_cache * 0)
    assert (attend(stored(nothing, kept_in, device), device) == 0).all()


@KINDS
def test_a_step_of_padding_beside_rows_changes_nothing_and_writes_nothing(device: str, kept_in: torch.dtype) -> None:
    case = paged_case([0, 300], [(17, 30), (3, 2)])
    plan = captured_plan(7, 40 * SPLIT // BLOCK, device, block_size=BLOCK, split=SPLIT)
    place(case, plan)
    padded = replace(case, q=torch.cat((case.q, torch.full((5, *case.q.shape[1:]), torch.nan))))
    narrowed = stored(case, kept_in, device)
    alone = attend(narrowed, device, split=SPLIT)
    got = attend(replace(narrowed, q=padded.q), device, plan=plan)
    assert torch.equal(got[:-5], alone)
    assert (got[-5:] == POISON).all()


def test_numbers_that_the_gpu_converts_give_what_computed_bits_give(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From compute capability 8.9 on, kernels read e4m3 as such, and as bytes before."""
    case = paged_case([0, 140], [(5, 11)], head_dim=32)
    kept_in = torch.float8_e4m3fn
    computed = check_attention(case, kept_in, device)
    cache = untouched((1, 4, 2, 16), kept_in)
    assert narrow_cache.readable(cache).dtype == torch.uint8
    monkeypatch.setattr(narrow_cache, "converts_e4m3", lambda: True)
    assert narrow_cache.readable(cache).dtype == kept_in
    converted = check_attention(case, kept_in, device)
    torch.testing.assert_close(converted, computed, atol=1e-6, rtol=1e-6)


@KINDS
def test_a_block_holds_its_numbers_and_then_its_scales_head_by_head(device: str, kept_in: torch.dtype) -> None:
    """A program reads the scales of one head: they are beside each other, behind aligned numbers."""
    cache = untouched((2, 4, 3, 16), kept_in, device)
    x = torch.zeros(1, 3, 16)
    x[0, :, 0] = torch.tensor([127.0, 2 * 127.0, 3 * 127.0])
    write_cache(x.to(device), x.to(device), cache, cache.clone(), torch.tensor([4 + 2], device=device))
    numbers, scales = parts_of(cache)
    largest = {torch.int8: 127, torch.float8_e4m3fn: 0x7E}[kept_in]
    assert numbers[1, 2, :, 0].tolist() == [largest] * 3
    raw = cache.cpu().view(torch.int8)[1].flatten()[4 * 3 * 16 :].view(torch.float32)
    assert raw[[2, 4 + 2, 8 + 2]].tolist() == scales[1, 2].tolist()
    assert int((~raw.isnan()).sum()) == 3
