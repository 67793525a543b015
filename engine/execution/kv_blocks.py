"""Owns the copies of a CPU's KV blocks to and from rows of memory (engine.tiers.copier.BlockCopier), also in 8 bits.
Never knows the order that the kernels have within a block, nor what rounds it to 8 bits."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.kv_cache import KVCache
from kernels.cpu.narrow_blocks import BlockForm, NarrowBlocks

MOST_AT_ONCE, BYTES_AT_ONCE = 8, 4 << 20
"""How many blocks, and bytes, are loaded by one copy at most. The engine looks at its loads after each copy, which took
longer than the copy of a small block; and a cancelled load waits for a copy under way, so that each is short."""


def load_batch(block_bytes: int) -> int:
    """Return how many blocks are loaded by one copy."""
    return max(1, min(MOST_AT_ONCE, BYTES_AT_ONCE // block_bytes))


class _Done:
    """A copy that is done when it is returned."""

    def wait(self) -> float:
        return 0.0

    def hold(self) -> None: ...


_DONE = _Done()


class CpuBlockCopier:
    """Copies a block of all layers by one assignment of NumPy, which needs neither the interpreter's lock nor a team
    of threads meanwhile. Steps are done when they are launched, so that nothing has to be waited for."""

    def __init__(self, cache: KVCache) -> None:
        assert cache.blocks is not None
        self._blocks: NDArray[np.uint8] = cache.blocks.numpy()  # [tensors, num_blocks, bytes]
        tensors, _, size = self._blocks.shape
        self._shape, self.block_bytes = (tensors, size), tensors * size
        self.write_batch = load_batch(self.block_bytes)

    def room(self) -> int:
        return sys.maxsize

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> _Done:
        for block_id, row in zip(block_ids, into, strict=True):
            np.copyto(self._of(row), self._blocks[:, block_id])
        return _DONE

    def fence(self) -> None:
        return None

    def write(self, block_ids: Sequence[int], rows: Sequence[memoryview], after: object) -> _Done:
        for block_id, row in zip(block_ids, rows, strict=True):
            np.copyto(self._blocks[:, block_id], self._of(row))
        return _DONE

    def close(self) -> None:
        self._blocks = np.empty((0, 0, 0), dtype=np.uint8)

    def _of(self, row: memoryview) -> NDArray[np.uint8]:
        """Return a row by tensor. # [tensors, bytes]"""
        return np.frombuffer(row, dtype=np.uint8).reshape(self._shape)


class NarrowBlockCopier:
    """Narrows a block when it is stored, and widens it when it is loaded: what comes back is rounded, once."""

    def __init__(self, cache: KVCache, blocks: NarrowBlocks) -> None:
        """blocks: of the cache's form; see `form_of`."""
        assert cache.blocks is not None
        self._blocks, self._memory = blocks, cache.blocks
        self.block_bytes = blocks.form.row_bytes
        self.write_batch = load_batch(cache.blocks[:, 0].nbytes)

    def room(self) -> int:
        return sys.maxsize

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> _Done:
        for block_id, row in zip(block_ids, into, strict=True):
            self._blocks.narrow(self._memory[:, block_id], row)
        return _DONE

    def fence(self) -> None:
        return None

    def write(self, block_ids: Sequence[int], rows: Sequence[memoryview], after: object) -> _Done:
        for block_id, row in zip(block_ids, rows, strict=True):
            self._blocks.widen(row, self._memory[:, block_id])
        return _DONE

    def close(self) -> None:
        self._memory = torch.empty(0, 0, 0, dtype=torch.uint8)


def form_of(cache: KVCache, kept_in: torch.dtype) -> BlockForm:
    """Return the form of a cache's blocks in `kept_in`, one of kernels.kv_format.LARGEST."""
    keys = cache.layers[0][0]
    _, tokens, heads, head_dim = keys.shape
    return BlockForm(2 * len(cache.layers), tokens, heads, head_dim, keys.dtype, kept_in)
