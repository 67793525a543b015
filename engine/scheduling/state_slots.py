"""Owns the places of recurrent state: a dense slot for each running request, and snapshots from which a prefix hit can
start. Never touches the state itself: it manages slot numbers, and says which copies the executor has to make."""

from __future__ import annotations

from collections import OrderedDict

from engine.scheduling.request import Request
from engine.scheduling.resources import Resource, RowParts, StepParts
from engine.step import ScheduledRequest, StateUse


class StateSlots:
    """n running requests hold slots 0 to n-1, so that a captured graph sees one range. When a request leaves, the last
    one moves to its slot (swap-remove). A move names slots as they are at the beginning of the step that carries it."""

    def __init__(self) -> None:
        self._owners: list[str] = []  # by slot
        self._slots: dict[str, int] = {}
        self._moves: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._owners)

    def slot_of(self, request_id: str) -> int:
        return self._slots[request_id]

    def take(self, request_id: str) -> None:
        assert request_id not in self._slots, f"{request_id} has a state slot"
        self._slots[request_id] = len(self._owners)
        self._owners.append(request_id)

    def give_back(self, request_id: str) -> None:
        hole, last = self._slots.pop(request_id), self._owners.pop()
        if last != request_id:
            self._owners[hole] = last
            self._moves.append((self._slots[last], hole))
            self._slots[last] = hole

    def take_moves(self) -> tuple[tuple[int, int], ...]:
        """Return the copies that the next step makes before anything else, (from, to) in order."""
        moves, self._moves = tuple(self._moves), []
        return moves


class Snapshots:
    """Snapshots of the state after a whole prefix, by the digest of its last block. The least recently used are
    overwritten first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self.epoch = 0
        """Changes whenever a lookup could return something else."""

    def find(self, digest: bytes) -> int | None:
        return self._slots.get(digest)

    def use(self, digest: bytes) -> int:
        self._slots.move_to_end(digest)
        return self._slots[digest]

    def reserve(self) -> int | None:
        """Return a slot to save to; None if all are being saved to. `publish` or `cancel` must follow."""
        if not self._free and self._slots:
            self._free.append(self._slots.popitem(last=False)[1])
            self.epoch += 1
        return self._free.pop() if self._free else None

    def publish(self, slot: int, digest: bytes) -> None:
        """Offer a saved snapshot. The first snapshot of a prefix stays."""
        if digest in self._slots:
            self.cancel(slot)
        else:
            self._slots[digest] = slot
            self.epoch += 1

    def cancel(self, slot: int) -> None:
        self._free.append(slot)


class RecurrentStates(Resource):
    """The slots and snapshots that requests of a hybrid model hold: one slot each, and snapshots for later prefix
    hits."""

    def __init__(self, *, num_snapshots: int, stride: int, block_size: int) -> None:
        """The state is saved after every `stride` tokens; 0 means never."""
        self.slots = StateSlots()
        self.snapshots = Snapshots(num_snapshots)
        self._stride = stride
        self._block_size = block_size
        self._restores: dict[str, int] = {}  # request id -> the snapshot from which it starts, until its first row

    @property
    def epoch(self) -> int:
        return self.snapshots.epoch

    def usable_prefix(self, request: Request, num_blocks: int) -> int:
        """Return the blocks up to the last snapshot."""
        while num_blocks and self.snapshots.find(request.block_hashes[num_blocks - 1]) is None:
            num_blocks -= 1
        return num_blocks

    def admit(self, request: Request, num_prefix_blocks: int) -> None:
        """Take a slot, and choose the snapshot to start from, before a row of the step may overwrite it with a save."""
        self.slots.take(request.request_id)
        if num_prefix_blocks:
            self._restores[request.request_id] = self.snapshots.use(request.block_hashes[num_prefix_blocks - 1])

    def take(self, request: Request, start: int, end: int, parts: RowParts) -> None:
        slot, restore = self.slots.slot_of(request.request_id), self._restores.pop(request.request_id, None)
        due = self._stride and end % self._stride == 0
        parts.state = StateUse(slot, restore, self.snapshots.reserve() if due else None)

    def finish(self, parts: StepParts) -> None:
        parts.state_moves = self.slots.take_moves()

    def advance(self, request: Request, row: ScheduledRequest, end: int) -> None:
        if row.state is None or row.state.save is None:
            return
        if end == row.end:
            self.snapshots.publish(row.state.save, request.block_hashes[end // self._block_size - 1])
        else:  # a draft was rejected before the position at which the state should be saved
            self.snapshots.cancel(row.state.save)

    def discard(self, row: ScheduledRequest) -> None:
        if row.state is not None and row.state.save is not None:
            self.snapshots.cancel(row.state.save)

    def release(self, request: Request) -> None:
        self.slots.give_back(request.request_id)
