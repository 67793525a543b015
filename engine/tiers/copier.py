"""Owns the interfaces that a mover stands between: what copies blocks of the device, and the files of blocks.
Never copies anything itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Landing(Protocol):
    """A copy that may be under way."""

    def wait(self) -> float:
        """Return when the copy is done, and for how many seconds the call has waited for steps and copies before it.
        Any thread."""
        ...

    def hold(self) -> None:
        """Let the steps that are launched from now on wait for the copy. Only the step thread."""


class BlockCopier(Protocol):
    """Copies whole blocks of the KV cache to and from rows of the machine's memory, byte for byte, or rounded to fewer
    bits when they are read. What was rounded once is not changed by further copies.

    A row has `block_bytes` bytes: the block's part of each tensor, one after another. A block that is read must have
    been written by an earlier step.
    """

    @property
    def block_bytes(self) -> int: ...

    @property
    def write_batch(self) -> int:
        """The most blocks that one `write` takes."""
        ...

    def room(self) -> int:
        """Return how many blocks may be read now. Only the step thread."""
        ...

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> Landing:
        """Copy blocks to rows, as the blocks are before any step that is launched from now on. Only the step
        thread. At most `room` blocks."""
        ...

    def fence(self) -> object:
        """Return the point behind all steps that were launched, for `write`. Only the step thread."""
        ...

    def write(self, block_ids: Sequence[int], rows: Sequence[memoryview], after: object) -> Landing:
        """Copy rows to blocks once the device is past `after`. Any thread. If it raises, no write follows."""
        ...

    def close(self) -> None:
        """Wait for copies that are under way, and drop the KV cache."""
        ...


class BlockFiles(Protocol):
    """A directory with a file for each block. Any thread may call it."""

    def read(self, digest: bytes, into: memoryview) -> None:
        """Raises: TierFault: there is no such block, or it is not what it was."""

    def write(self, digest: bytes, data: memoryview) -> int:
        """Return the number of bytes written. Raises: TierFault: it was not stored."""
        ...

    def drop(self, digests: Sequence[bytes]) -> None: ...

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Return what others have added (True) or removed (False), in order."""
        ...

    def sizes(self) -> tuple[int, int]:
        """Return (capacity, used) in bytes."""
        ...

    def reset(self) -> int:
        """Remove all blocks of this model, and return their number. Raises: TierFault: they cannot be removed, and are
        not read any more."""
        ...

    def on_change(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...
