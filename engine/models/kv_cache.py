"""Owns the memory of the KV cache: how many blocks there are and the tensors that hold them.
Never knows which request a block belongs to; the scheduler's block manager does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.config import ModelConfig
from kernels.cpu.mapping import map_memory
from kernels.kv_format import stored_size


def cache_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of K and V in the cache if the engine computes in `dtype`. asked: EngineConfig.kv_cache_dtype."""
    return {"auto": dtype, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[asked]


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of `block_size` tokens in all layers with attention, including the scales of a narrow
    `dtype`."""
    row = stored_size(model.head_dim, dtype) * dtype.itemsize
    return 2 * model.num_attention_layers * block_size * model.num_kv_heads * row


def blocks_in(memory_gib: float, block_bytes: int, state_bytes: int = 0) -> int:
    """Return how many whole blocks fit into `memory_gib` besides recurrent states.

    Raises:
        ConfigError: not one fits.
    """
    blocks = (int(memory_gib * 2**30) - state_bytes) // block_bytes
    if blocks < 1:
        states = f"its recurrent states take {state_bytes} (max_num_seqs, state_snapshots), and " if state_bytes else ""
        raise ConfigError(
            f"kv_cache_memory_gib is {memory_gib} ({memory_gib * 2**30:.0f} bytes), "
            f"but {states}one block of this model takes {block_bytes} bytes."
        )
    return blocks


PAGE = 4096
"""Each tensor begins at a multiple of so many bytes of the cache's memory."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """(K, V) of each layer that has them, each [num_blocks, block_size, kv_heads, stored_size(head_dim)].

    Slot = block * block_size + offset. The native kernels and Triton's narrow cache order the bytes within a block
    differently; see kernels/cpu/native/cache.h and kernels/triton/shared/narrow_cache.py.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    blocks: Tensor | None = None
    """The same memory as bytes, so that one operation copies a block of all layers, whatever is where within it.
    # [2 * num_layers, num_blocks, bytes of a block in a tensor] uint8. None: the tensors are not in one piece."""

    @classmethod
    def allocate(
        cls,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> KVCache:
        """Allocate zeros. On a CPU (device None) a page takes memory when its first block is used; whoever allocates
        has checked that there will be enough."""
        shape = (num_blocks, block_size, model.num_kv_heads, stored_size(model.head_dim, dtype))
        size = math.prod(shape) * dtype.itemsize
        apart, count = -(-size // PAGE) * PAGE, 2 * model.num_attention_layers
        if device is None or device.type == "cpu":
            # Small pages: with large ones, a first block would zero 2 MiB in each tensor within its step.
            memory = torch.frombuffer(map_memory(count * apart, large_pages=False), dtype=torch.uint8)
        else:
            memory = torch.zeros(count * apart, dtype=torch.uint8, device=device)
        tensors = [memory[begin : begin + size].view(dtype).view(shape) for begin in range(0, count * apart, apart)]
        block_bytes = size // num_blocks
        blocks = memory.as_strided((count, num_blocks, block_bytes), (apart, block_bytes, 1))
        return cls(tuple(zip(tensors[::2], tensors[1::2], strict=True)), blocks)
