"""Owns the copies of a GPU's KV blocks to and from rows of the host's memory (engine.tiers.copier.BlockCopier).
Never lets a step wait for the bus: blocks are gathered within the device, and cross it beside the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from engine.execution.device import Device, Mark, SideQueue
from engine.models.kv_cache import KVCache
from engine.tiers.loads import READERS

GROUP_BYTES = 8 * 2**20
"""Size of a buffer on the device: large enough for the full speed of the bus, small enough to come by soon."""
MOST_IN_GROUP = 32
STORE_GROUPS = 16
"""Buffers for blocks that leave. While all are on their way, stores are refused."""
LOAD_GROUPS = 1 + READERS
"""Buffers for blocks that come: one for each thread that loads."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Blocks are copied in the largest of these that divides them: a GPU copies words faster than bytes."""


def group_blocks(block_bytes: int) -> int:
    """Return how many blocks one buffer holds."""
    return max(1, min(MOST_IN_GROUP, GROUP_BYTES // block_bytes))


def buffer_bytes(block_bytes: int) -> int:
    """Return the device's memory that a copier takes."""
    return (STORE_GROUPS + LOAD_GROUPS) * group_blocks(block_bytes) * block_bytes


class _Landing:
    """A copy that the device does beside the steps."""

    def __init__(self, queue: SideQueue, after: Mark, mark: Mark, landed: Callable[[], None] | None = None) -> None:
        """after: the point that the copy comes after. landed: called once the copy is done."""
        self._queue, self._after, self._mark, self._landed = queue, after, mark, landed

    def wait(self) -> float:
        began = time.perf_counter()
        try:
            self._after.wait()
            waited_s = time.perf_counter() - began
            self._mark.wait()
        finally:
            landed, self._landed = self._landed, None
            if landed is not None:
                landed()
        return waited_s

    def hold(self) -> None:
        self._queue.hold_steps(self._mark)


class DeviceBlockCopier:
    """Gathers blocks of all layers by one operation, and scatters them likewise."""

    def __init__(self, cache: KVCache, device: Device) -> None:
        assert cache.blocks is not None
        tensors, _, size = cache.blocks.shape
        word = next(word for word in _WORDS if not size % word.itemsize)
        self.block_bytes, self.write_batch = tensors * size, group_blocks(tensors * size)
        self._device, self._queue, self._word = device, device.side_queue(), word
        self._blocks = cache.blocks.view(word).transpose(0, 1)  # [num_blocks, tensors, words]
        self._shape = tensors, size // word.itemsize
        self._leaving = deque[tuple[Mark, Tensor]]()
        self._unused = [self._buffer() for _ in range(STORE_GROUPS)]
        self._coming = SimpleQueue[Tensor]()
        for _ in range(LOAD_GROUPS):
            self._coming.put(self._buffer())

    def _buffer(self) -> Tensor:
        return torch.empty((self.write_batch, *self._shape), dtype=self._word, device=self._device.torch_device)

    def room(self) -> int:
        while self._leaving and self._leaving[0][0].is_past:
            self._unused.append(self._leaving.popleft()[1])
        return len(self._unused) * self.write_batch

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> _Landing:
        places = self._device.upload(torch.tensor(block_ids))
        groups = []
        for begin in range(0, len(into), self.write_batch):
            rows, buffer = into[begin : begin + self.write_batch], self._unused.pop()
            torch.index_select(self._blocks, 0, places[begin : begin + len(rows)], out=buffer[: len(rows)])
            groups.append((buffer, rows))
        mark = after = self._queue.mark_steps()
        for buffer, rows in groups:
            mark = self._queue.run(partial(self._to_host, buffer, rows), after)
            self._leaving.append((mark, buffer))
        return _Landing(self._queue, after, mark)

    def fence(self) -> Mark:
        return self._queue.mark_steps()

    def write(self, block_ids: Sequence[int], rows: Sequence[memoryview], after: Any) -> _Landing:
        buffer = self._coming.get()
        landed = partial(self._coming.put, buffer)
        try:
            # Stores are in the same queue, and may wait for later steps than `after`.
            start = self._queue.run(lambda: None, after)
            mark = self._queue.run(partial(self._to_device, block_ids, rows, buffer), after)
        except BaseException:
            landed()
            raise
        return _Landing(self._queue, start, mark, landed)

    def close(self) -> None:
        for mark, _ in self._leaving:
            mark.wait()
        self._leaving.clear()
        self._unused.clear()
        self._blocks = torch.empty(0)

    def _to_host(self, buffer: Tensor, rows: Sequence[memoryview]) -> None:
        for row, block in zip(rows, buffer, strict=False):
            self._of(row).copy_(block, non_blocking=True)

    def _to_device(self, block_ids: Sequence[int], rows: Sequence[memoryview], buffer: Tensor) -> None:
        for row, block in zip(rows, buffer, strict=False):
            block.copy_(self._of(row), non_blocking=True)
        places = self._device.upload(torch.tensor(block_ids))
        self._blocks.index_copy_(0, places, buffer[: len(rows)])

    def _of(self, row: memoryview) -> Tensor:
        """Return a row by tensor. # [tensors, words]"""
        return torch.frombuffer(row, dtype=self._word).view(self._shape)
