"""Owns the contract of the KV cache's memory on a CPU: zeros, which take memory as they are used, and go back.
Never knows what is in a block: tests of kernels and executors do."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.models.config import read_model_config
from engine.models.description import ModelConfig
from engine.models.kv_cache import PAGE, KVCache, bytes_per_block
from tests.support.memory_maps import mapping_flags, needs_huge_pages
from tests.support.tiny_models import save_model

BLOCK_SIZE = 16
MIB = 2**20

if not Path("/proc/self/smaps_rollup").exists():
    pytest.skip("only Linux says how much memory a process takes", allow_module_level=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    save_model("llama", directory)
    return replace(read_model_config(directory), num_kv_heads=8, head_dim=64)


def mapped() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def private() -> int:
    """Return the bytes of memory that this process alone has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def allocate(model: ModelConfig, size: int, dtype: torch.dtype) -> KVCache:
    return KVCache.allocate(model, size // bytes_per_block(model, BLOCK_SIZE, dtype), BLOCK_SIZE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_cache_is_zeros_of_its_shape_and_type(model: ModelConfig, dtype: torch.dtype) -> None:
    cache = KVCache.allocate(model, 3, BLOCK_SIZE, dtype)
    assert len(cache.layers) == model.num_attention_layers
    tensors = [tensor for pair in cache.layers for tensor in pair]
    assert {(tensor.dtype, tensor.shape[:3]) for tensor in tensors} == {(dtype, (3, BLOCK_SIZE, model.num_kv_heads))}
    assert sum(tensor.nbytes for tensor in tensors) == 3 * bytes_per_block(model, BLOCK_SIZE, dtype)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    for tensor in tensors:
        assert not tensor.view(torch.uint8).any()
        tensor.view(torch.uint8).fill_(7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_block_of_all_layers_is_one_slice_of_the_memory(model: ModelConfig, dtype: torch.dtype) -> None:
    """Tensors whose sizes are no multiple of a page begin at one, and the slice must reach each of them."""
    cache = KVCache.allocate(model, 5, BLOCK_SIZE, dtype)
    tensors = [tensor for pair in cache.layers for tensor in pair]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % PAGE == 0
        assert tensor.is_contiguous()
        tensor.view(torch.uint8)[3] = number + 1
    assert cache.blocks is not None
    assert cache.blocks.shape == (len(tensors), 5, bytes_per_block(model, BLOCK_SIZE, dtype) // len(tensors))
    for block in range(5):
        want = [number + 1 if block == 3 else 0 for number in range(len(tensors))]
        assert [row.unique().tolist() for row in cache.blocks[:, block]] == [[number] for number in want]


def test_memory_is_taken_as_blocks_are_written_and_goes_back_with_the_cache(model: ModelConfig) -> None:
    """The whole cache used to be written at the start: 2 GiB, of which 16 streams need a fifth."""
    gc.collect()
    free, space = private(), mapped()
    cache = allocate(model, 512 * MIB, torch.bfloat16)
    assert mapped() - space > 400 * MIB
    assert private() - free < 32 * MIB
    keys = cache.layers[0][0]
    keys[: len(keys) // 2].fill_(1.0)
    assert abs(private() - free - keys.nbytes // 2) < 32 * MIB
    del cache, keys
    gc.collect()
    assert private() - free < 32 * MIB
    assert mapped() - space < 400 * MIB


@needs_huge_pages
def test_a_first_block_takes_small_pages_also_where_the_system_gives_huge_ones_to_all(model: ModelConfig) -> None:
    """With huge pages, the step that first uses a block zeroed 2 MiB in each tensor of each layer."""
    cache = allocate(model, 64 * MIB, torch.bfloat16)
    for tensor in (tensor for pair in cache.layers for tensor in pair):
        assert "nh" in (mapping_flags(tensor.data_ptr()) or [])
