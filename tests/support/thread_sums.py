"""Owns sums over ranks that are threads of a test, in the order of ranks.
Never leaves a thread waiting: when one rank closes its end, the sums of all fail."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class ThreadSums:
    """One rank's end; see kernels.collectives.group.Group."""

    def __init__(self, rank: int, parts: list[Tensor | None], meets: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(parts)
        self.num_sums = 0
        self._parts = parts
        self._meets = meets

    def all_reduce(self, x: Tensor) -> Tensor:
        """Raises threading.BrokenBarrierError: a rank has closed its end."""
        self.num_sums += 1
        self._parts[self.rank] = x
        self._meets.wait(30)
        total = torch.stack([part for part in self._parts if part is not None]).sum(dim=0)
        self._meets.wait(30)
        return x.copy_(total)

    def close(self) -> None:
        self._meets.abort()


def make_thread_sums(size: int) -> list[ThreadSums]:
    parts: list[Tensor | None] = [None] * size
    meets = threading.Barrier(size)
    return [ThreadSums(rank, parts, meets) for rank in range(size)]
