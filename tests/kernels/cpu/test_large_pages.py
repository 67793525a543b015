"""Owns the contract of memory for weights: tensors apart from each other, on large pages, given back with the last.
Never measures a time: benchmarks.engine.step does."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.cpu.large_pages import LARGE_PAGE, REGION, LargePages
from tests.support.memory_maps import mapping_flags, needs_huge_pages


def apart(tensors: list[Tensor]) -> bool:
    """Whether no two of them share a byte."""
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    return all(end <= begin for (_, end), (begin, _) in pairwise(places))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_tensor_has_its_shape_its_type_and_a_storage_of_its_own(dtype: torch.dtype) -> None:
    pages = LargePages()
    first, second = pages.empty(3, 5, 7, dtype=dtype), pages.empty(9, dtype=dtype)
    for tensor, shape in ((first, (3, 5, 7)), (second, (9,))):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    # A tied LM head is known by its storage.
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_tensor_without_elements_is_one() -> None:
    assert LargePages().empty(0, 4, dtype=torch.float32).shape == (0, 4)


@pytest.mark.parametrize("size", [1, 1000, LARGE_PAGE, REGION // 2, REGION // 2 + 1, 2 * REGION + 3])
def test_tensors_of_any_size_are_apart(size: int) -> None:
    pages = LargePages()
    tensors = [pages.empty(each, dtype=torch.uint8) for each in (size, 1, size, REGION // 3, size)]
    assert apart(tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_threads_get_tensors_that_are_apart() -> None:
    pages = LargePages()
    with ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(lambda size: pages.empty(size, dtype=torch.uint8), range(1, 4000)))
    assert apart(tensors)


@needs_huge_pages
@pytest.mark.parametrize("size", [100, REGION])
def test_they_lie_on_large_pages(size: int) -> None:
    pages = LargePages()
    tensors = [pages.empty(size, dtype=torch.uint8) for _ in range(2)]
    assert tensors[0].data_ptr() % LARGE_PAGE == 0
    for tensor in tensors:
        assert "hg" in (mapping_flags(tensor.data_ptr()) or [])


@needs_huge_pages
def test_memory_goes_back_with_the_last_tensor_of_a_region_and_no_sooner() -> None:
    """A checkpoint's matrix may be dropped while others of its region are read in every step."""
    pages = LargePages()
    kept, dropped, alone = (
        pages.empty(100, dtype=torch.uint8),
        pages.empty(100, dtype=torch.uint8),
        pages.empty(REGION, dtype=torch.uint8),
    )
    own, shared = alone.data_ptr(), kept.fill_(7).data_ptr()
    del dropped, alone, pages
    gc.collect()
    assert mapping_flags(own) is None
    assert bool((kept == 7).all())
    del kept
    gc.collect()
    assert mapping_flags(shared) is None
