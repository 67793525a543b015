"""Owns the copies of a CPU's KV blocks to and from rows of memory (engine.tiers.copier.BlockCopier).
Never looks at what is in a block: its bytes are copied, in whatever order the kernels have them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.models.kv_cache import KVCache


class _Done:
    """A copy that is done when it is returned."""

    def wait(self) -> None: ...

    def hold(self) -> None: ...


_DONE = _Done()


class CpuBlockCopier:
    """Copies a block of all layers by one assignment of NumPy, which needs neither the interpreter's lock nor a team
    of threads meanwhile. Steps are done when they are launched, so that nothing has to be waited for."""

    write_batch = 1
    """A cancelled load waits for a copy under way, so that each copy is short."""

    def __init__(self, cache: KVCache) -> None:
        assert cache.blocks is not None
        self._blocks: NDArray[np.uint8] = cache.blocks.numpy()  # [tensors, num_blocks, bytes]
        tensors, _, size = self._blocks.shape
        self._shape, self.block_bytes = (tensors, size), tensors * size

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
