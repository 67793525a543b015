"""Owns the memory of the KV cache: how many blocks there are and the tensors that hold them.
Never knows which request a block belongs to; the scheduler's block manager does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.config import ModelConfig


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """K and V of `block_size` tokens in every layer."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def blocks_in(memory_gib: float, block_bytes: int) -> int:
    """Whole blocks in that much memory.

    Raises:
        ConfigError: not one fits.
    """
    blocks = int(memory_gib * 2**30) // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_gib is {memory_gib} ({memory_gib * 2**30:.0f} bytes), "
            f"but one block of this model takes {block_bytes} bytes."
        )
    return blocks


@dataclass(frozen=True, slots=True)
class KVCache:
    """(K, V) of each layer, each [num_blocks, block_size, kv_heads, head_dim]. Slot = block * block_size + offset."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def allocate(cls, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        """Zeroed, which touches every page: a machine without that much memory fails at start, not under load."""
        shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
        return cls(
            tuple((torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(model.num_layers))
        )
