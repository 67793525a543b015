"""Owns the contract for KV that outlives the device's memory: the tiers, the moves between them, and what is told back.
Never decides what moves (engine.scheduling does), and never copies a byte (engine.tiers does)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol


class Tier(StrEnum):
    """A place below the device's memory, nearest first."""

    HOST = "host"
    """Memory of the machine, the engine's own."""
    DISK = "disk"
    """A directory, which other engines of the machine may share, and which outlives them."""


class MoveKind(Enum):
    STORE = "store"
    """From the device to the tier."""
    LOAD = "load"
    """From the tier to the device."""


class BlockMove(NamedTuple):
    """A copy of one block's KV between the device and a tier."""

    move_id: int
    """Unique in the engine's life."""
    kind: MoveKind
    tier: Tier
    digest: bytes
    """The name of the block's content: of its tokens and all before them; see engine.prefix."""
    block_id: int
    """The block of the device."""


class MoveResult(NamedTuple):
    """The end of a move. Each move that was begun and not cancelled has one."""

    move: BlockMove
    error: str = ""
    """Why nothing was stored or loaded; empty if the move is done. After a failed load the block's content is
    undefined, and the tier no longer has the digest."""
    seconds: float = 0.0
    """How long the copy took, without waiting for others."""
    num_bytes: int = 0


class TierChange(NamedTuple):
    """A block that a tier has from now on, or no longer, other than by this engine's moves and drops: what a directory
    had at the start, what other engines add to it, and what its bound costs."""

    tier: Tier
    digest: bytes
    present: bool


class TierSize(NamedTuple):
    """What a tier holds at most and holds now. A directory that is shared counts everything in it."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int


@dataclass(slots=True)
class TierLoad:
    """What a tier holds now, and totals of what it has done since the engine's start."""

    tier: Tier
    num_blocks: int = 0
    """Blocks that this engine knows to be there."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Engines that share a directory report all of it, each."""
    hit_blocks: int = 0
    """Blocks of prompts that were loaded instead of computed."""
    stored_blocks: int = 0
    evicted_blocks: int = 0
    """Blocks that left for others to have room."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    failed_loads: int = 0
    """Blocks that could not be read, or were not what their name says."""
    failed_stores: int = 0
    refused_stores: int = 0
    """Stores that the tier had no room to queue."""
    late_loads: int = 0
    """Requests that were computed after all, because their blocks did not come within load_timeout_s."""


class KvMover(Protocol):
    """Moves blocks beside the steps. Only the step thread calls it; nothing here waits for a disk or for another
    process.

    A step's stores read their blocks as they are before the step's rows run, and its loads write blocks that no row
    reads before their results were taken. A tier keeps what it was given under its digest until it is dropped. The disk
    bounds itself, and says what it lost (`take_changes`); the host tier never drops by itself.
    """

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers there are, nearest first."""
        ...

    @property
    def host_blocks(self) -> int:
        """How many blocks the host tier holds; 0 if there is none."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's KV in a tier, which may keep it in fewer bits than the device."""
        ...

    def begin(self, moves: Sequence[BlockMove], dropped: Sequence[tuple[Tier, bytes]] = ()) -> None:
        """Drop blocks from tiers, then start moves, in this order. Called before the step's rows are launched, or
        without a step. A fault of a move is a result with an error, never an exception. A store into a disk that is
        behind fails at once with `BUSY`."""
        ...

    def cancel(self, move_ids: Sequence[int]) -> None:
        """Give up loads. When this returns (on a GPU: before any later work of the step's stream), none of them writes
        to its block any more; they have no results. Unknown and finished ones are ignored."""
        ...

    def take_results(self) -> list[MoveResult]:
        """Return the moves that ended since the last call, in the order in which they ended."""
        ...

    def take_changes(self) -> list[TierChange]:
        """Return what changed since the last call by other hands, in order."""
        ...

    def sizes(self) -> tuple[TierSize, ...]: ...

    def reset(self) -> int:
        """Forget everything in all tiers, files included, of this engine's model; return the number of blocks. Loads
        under way end with an error."""
        ...

    def on_result(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever results or changes become available, on any thread. It is quick and never raises."""
        ...

    def shutdown(self) -> None:
        """End threads and files. Stores that are under way may be lost, and never leave a broken file behind."""
        ...


BUSY = "busy"
"""The error of a store that the tier has no room to queue; it may be tried again."""
