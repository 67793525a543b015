"""Owns memory for the weights of a model on pages of 2 MiB, where the system has them.
Never moves what lies on small pages: that takes longer than the start may."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from math import prod
from threading import Lock

import torch
from torch import Tensor

from kernels.cpu.mapping import map_memory

LARGE_PAGE = 2 << 20
REGION = 64 << 20
"""Bytes that smaller matrices share: of many models, each of them has less than a page."""
_ALIGNMENT = 64
Empty = Callable[..., Tensor]
"""As torch.empty: takes the sizes, and `dtype` by name."""


def empty_on(device: torch.device | None) -> Empty:
    """Return what allocates weights on a device; None means the CPU."""
    return LargePages().empty if device is None or device.type == "cpu" else partial(torch.empty, device=device)


class LargePages:
    """Memory for weights that are dropped at about the same time: a region goes back to the system with the last tensor
    in it. Several threads may ask.

    A token of a single stream reads all weights once, and the processor's tables hold the addresses of few small pages:
    with large ones two threads read 32 GB/s instead of 26.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._region, self._free = _region(0)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined contents and a storage of its own."""
        count = prod(shape)
        if not count:
            return torch.empty(*shape, dtype=dtype)
        size = count * dtype.itemsize
        if size > REGION // 2:
            memory, free = _region(size)
        else:
            with self._lock:
                if len(self._free) < size:
                    self._region, self._free = _region(REGION)
                memory, free = self._region, self._free
                self._free = free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=free.start).view(*shape)


def _region(size: int) -> tuple[mmap.mmap, range]:
    """Map memory, and return it with those `size` bytes of it that begin where a large page does."""
    memory = map_memory(size + LARGE_PAGE, large_pages=True)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    return memory, range(first, first + size)
