"""Owns the definition of blocks in 8 bits: how far a number is off, that nothing drifts, and what has no scale.
Never needs a compiler: the native conversion is compared with this one elsewhere."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from kernels.cpu.narrow_blocks import (
    SMALLEST,
    BlockForm,
    TorchBlocks,
    largest_scale,
    narrow_vectors,
    scales_of,
    widen_vectors,
)
from kernels.cpu.narrow_cache import narrow
from kernels.kv_format import LARGEST
from tests.kernels.cpu.block_case import DTYPES, NARROW, block_of, special, vectors
from tests.kernels.rows import seeded_generator

KINDS = [pytest.param(dtype, kept, id=f"{dtype}-{kept}") for dtype in DTYPES for kept in NARROW]


def there_and_back(x: Tensor, kept_in: torch.dtype) -> Tensor:
    return widen_vectors(*narrow_vectors(x, kept_in), kept_in, x.dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
def test_what_was_narrowed_once_is_narrowed_to_the_same_bytes_again(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    """So a block that goes back and forth is rounded once."""
    x = vectors(20_000, 16, dtype)
    numbers, scales = narrow_vectors(x, kept_in)
    again = narrow_vectors(widen_vectors(numbers, scales, kept_in, dtype), kept_in)
    assert torch.equal(again[0], numbers)
    assert same_bits(again[1], scales)


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
def test_a_number_is_off_by_half_a_unit_at_most(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    x = torch.randn(500, 64, generator=seeded_generator()) * torch.logspace(-20, 20, 500)[:, None]
    x = x.to(dtype)
    largest = x.abs().amax(dim=-1, keepdim=True).double()
    steps = 254 if kept_in == torch.int8 else 28  # see test_narrow_cache.py
    result = 0 if dtype == torch.float32 else 2.0**-8  # what is widened is rounded to the cache's type
    assert ((there_and_back(x, kept_in).double() - x.double()).abs() <= largest * (1.001 / steps + result)).all()


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
def test_scales_and_numbers_are_those_of_a_cache_in_8_bits(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    x = torch.randn(5000, 32, generator=seeded_generator()).to(dtype)
    numbers, scales = narrow_vectors(x, kept_in)
    cached = narrow(x, kept_in)
    assert torch.equal(numbers, cached[:, :32])
    assert torch.equal(scales.view(torch.int32)[:, None], cached[:, 32:].contiguous().view(torch.int32))


@pytest.mark.parametrize("kept_in", NARROW)
def test_every_scale_of_a_largest_magnitude_is_that_of_what_it_is_widened_to(kept_in: torch.dtype) -> None:
    """In float32, for a third of all mantissas, of every remainder: then for all magnitudes that have a scale."""
    largest = torch.arange(2**23, 2**24, 3).float()
    scales = scales_of(largest, kept_in)
    assert torch.equal(scales_of(scales * LARGEST[kept_in], kept_in), scales)


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
def test_what_is_not_finite_is_all_nan_and_what_is_too_small_is_all_zero(
    dtype: torch.dtype, kept_in: torch.dtype
) -> None:
    x = special(32, dtype)
    got = there_and_back(x, kept_in)
    finite = x.isfinite().all(dim=-1)
    assert got[~finite].isnan().all(), "an infinity or NaN would be hidden among numbers"
    assert got[finite].isfinite().all(), "the largest number became infinite"
    small = finite & (x.abs().amax(dim=-1).double() < 0.995 * SMALLEST * LARGEST[kept_in])
    assert small.sum() >= 4
    assert not got[small].any()
    assert got[finite & ~small].any(dim=-1).all()


@pytest.mark.parametrize("kept_in", NARROW)
def test_no_scale_makes_the_largest_number_infinite_and_none_is_smaller_than_need_be(kept_in: torch.dtype) -> None:
    most = torch.tensor(largest_scale(kept_in), dtype=torch.float32)
    assert (most * LARGEST[kept_in]).isfinite()
    assert (most * (1 + 2.0**-22) * LARGEST[kept_in]).isinf()


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(16, 2, 16), (5, 3, 7), (64, 9, 80)])
def test_a_blocks_row_has_each_tensors_numbers_and_then_its_scales(
    dtype: torch.dtype, kept_in: torch.dtype, tokens: int, heads: int, head_dim: int
) -> None:
    """Also of a block that is converted in pieces, in memory of which a block is a part, into a row that begins
    anywhere."""
    form = BlockForm(4, tokens, heads, head_dim, dtype, kept_in)
    x = block_of(form)
    blocks = TorchBlocks(form)
    raw = x.reshape(4, -1).view(torch.uint8)
    memory = torch.full((4, 3, raw.shape[1]), 7, dtype=torch.uint8)
    memory[:, 1] = raw
    row = memoryview(bytearray(form.row_bytes + 1))[1:]
    blocks.narrow(memory[:, 1], row)
    numbers, scales = narrow_vectors(x.view(4, -1, head_dim), kept_in)
    want = torch.cat([numbers.flatten(1).view(torch.uint8), scales.view(torch.uint8).view(4, -1)], 1)
    assert torch.equal(torch.frombuffer(row, dtype=torch.uint8), want.flatten())
    memory[:, 1] = 9
    blocks.widen(row, memory[:, 1])
    wide = widen_vectors(numbers, scales, kept_in, dtype)
    assert torch.equal(memory[:, 1], wide.flatten(1).view(torch.uint8).view(4, -1))
    assert memory[:, 0].eq(7).all()
    assert memory[:, 2].eq(7).all()


def test_a_conversion_starts_no_threads() -> None:
    """It runs beside the steps, which have all cores."""
    form = BlockForm(4, 64, 32, 128, torch.bfloat16, torch.int8)
    block, row = block_of(form).view(4, -1).view(torch.uint8), memoryview(bytearray(form.row_bytes))
    found: list[int] = []

    def convert() -> None:
        torch.set_num_threads(3)
        before = _threads_of_this_process()
        TorchBlocks(form).narrow(block, row)
        TorchBlocks(form).widen(row, block)
        found.append(_threads_of_this_process() - before)

    thread = threading.Thread(target=convert)
    before = torch.get_num_threads()
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert found == [0]


def _threads_of_this_process() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
