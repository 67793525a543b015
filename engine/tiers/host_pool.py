"""Owns the memory of the host tier: rows of one mapping, which digest each has, and who is using it.
Never evicts: whoever plans says what is dropped. Never reads or writes a row."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from kernels.cpu.mapping import map_memory

Pin = Callable[[memoryview], Callable[[], None]]
"""Makes memory known to a device, and returns what undoes that."""


class HostPool:
    """Rows of one block each, of which some have the name of their content. A row is free once it has no name and
    nobody holds it, so that it is not written again while a thread reads it. Any thread may call it."""

    def __init__(self, num_blocks: int, spare_rows: int, block_bytes: int, pin: Pin | None = None) -> None:
        """num_blocks: the most rows that have a name. spare_rows: further rows, for blocks on their way."""
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._rows = num_blocks + spare_rows
        # On small pages, first stores took three times as long.
        self._memory = memoryview(map_memory(max(1, self._rows * block_bytes), large_pages=True))
        self._unpin = None if pin is None or not self._rows else pin(self._memory)
        self._free: list[int] = [*range(self._rows - 1, -1, -1)]  # the lowest first: memory is taken as it is used
        self._holds = [0] * self._rows
        self._named: dict[bytes, int] = {}
        self._lock = Lock()

    @property
    def num_named(self) -> int:
        """How many digests there are."""
        return len(self._named)

    def has(self, digest: bytes) -> bool:
        return digest in self._named

    def view(self, row: int) -> memoryview:
        """Return a row's memory. # [block_bytes]"""
        begin = row * self.block_bytes
        return self._memory[begin : begin + self.block_bytes]

    def take(self) -> int | None:
        """Return a free row, which the caller holds; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            row = self._free.pop()
            self._holds[row] = 1
            return row

    def find(self, digest: bytes) -> int | None:
        """Return the row of a digest, which the caller holds, too; None if there is none."""
        with self._lock:
            row = self._named.get(digest)
            if row is not None:
                self._holds[row] += 1
            return row

    def release(self, row: int) -> None:
        """End one hold."""
        with self._lock:
            self._release(row)

    def name(self, row: int, digest: bytes) -> bool:
        """Keep a held row under a name. Return whether that is so: False if the names are used up, or it has a row."""
        with self._lock:
            if len(self._named) >= self.num_blocks or digest in self._named:
                return False
            self._named[digest] = row
            self._holds[row] += 1
            return True

    def drop(self, digest: bytes) -> None:
        """Forget a name. Its row is free once nobody holds it."""
        with self._lock:
            if (row := self._named.pop(digest, None)) is not None:
                self._release(row)

    def reset(self) -> int:
        """Forget all names, and return how many there were."""
        with self._lock:
            rows = [*self._named.values()]
            self._named.clear()
            for row in rows:
                self._release(row)
            return len(rows)

    def close(self) -> None:
        """Take the memory from the device. It goes back to the system with the last row that somebody uses."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = memoryview(b"")

    def _release(self, row: int) -> None:
        assert self._holds[row] > 0, "a row was released more often than held"
        self._holds[row] -= 1
        if not self._holds[row]:
            self._free.append(row)
