"""Owns the contract of what a tier drops when it is full, and its plain form: the least recently used.
Never decides what is stored or loaded, and never holds a block's KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol


class BlockFacts(NamedTuple):
    """What is known of a block when it is stored."""

    position: int
    """Tokens of the prompt before the block."""
    parent: bytes = b""
    """The digest of the block before it; b"" for a first block."""
    cost_s: float | None = None
    """Predicted seconds to compute the block again where its prefix is there; None if nobody predicts."""
    tenant: str = ""
    session: str = ""
    """The conversation that it was computed for, by `session_key`; "" if nobody named one."""


def session_key(tenant: str, cache_salt: str, session: str) -> str:
    """Return the name of a conversation among those of all tenants and salts, in 32 characters; "" for no session."""
    if not session:
        return ""
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, cache_salt, session)]
    return blake2b(b"".join(len(part).to_bytes(4, "little") + part for part in parts), digest_size=16).hexdigest()


class Retention(Protocol):
    """Chooses what a tier drops. It is told what the tier has, and never drops a block before those that follow it: a
    prefix is useless without its head.

    `now` is in monotonic seconds and never decreases. Digests of blocks that the tier does not have are ignored.
    """

    def add(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        """Note that the tier has a block.

        Raises:
            KeyError: it has it already.
        """
        ...

    def use(self, digests: Sequence[bytes], now: float) -> None:
        """Note that a prompt begins with these blocks, and that they were found, wherever: a prefix that is always
        found on the device would else seem forgotten here."""
        ...

    def end_turn(self, session: str, chain: Sequence[bytes], now: float) -> None:
        """Note that a request ended. `chain`: all full blocks of its prompt and answer, in order. `session`: its
        `session_key`, or ""."""
        ...

    def supersede(self, digests: Iterable[bytes]) -> None:
        """Note that nobody is expected to ask for these blocks again."""
        ...

    def remove(self, digest: bytes) -> None:
        """Note that the tier lost a block otherwise than by `pop_victim`."""
        ...

    def hold(self, digest: bytes) -> None:
        """Do not choose a block, until `release` was called as often."""
        ...

    def release(self, digest: bytes) -> None: ...

    def pop_victim(self, now: float) -> bytes | None:
        """Choose a block to drop, and forget it. None if there is none, or all are held or precede one that is."""
        ...

    def pop_victim_for(self, digest: bytes, facts: BlockFacts, now: float) -> bytes | None:
        """Choose what to drop for a block that the tier is to have, and forget it: `digest` itself if that is worth
        least. The block is not there before `add`."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, digest: object) -> bool: ...


class Block:
    """A block that a tier has."""

    __slots__ = (
        "digest", "entry", "kind", "num_pins", "octave", "parent", "position", "session", "tenant", "used_at", "weight",
    )  # fmt: skip

    def __init__(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        self.digest = digest
        self.position, self.parent, _, self.tenant, self.session = facts
        self.weight = 1.0
        """For `by_value`, as are `octave`, which is that of the weight, and `kind`."""
        self.octave = 0
        self.kind = 0
        self.used_at = now
        self.num_pins = 0
        """Why it cannot be dropped: blocks that follow it, and holds."""
        self.entry = 0
        """The number of its valid entry in a queue; 0 if it has none."""


Entry = tuple[float, int, int, Block]
"""When the block was used, its position with a minus, the number of the entry, and the block."""
MIN_ENTRIES = 1024
MOST_PLACES = 6
"""Places in the queues for each block. A valid entry has two where there are several tenants."""


class Chains(ABC):
    """Keeps the blocks of a tier, and finds those without a follower. Whoever derives from it queues these.

    Queues are heaps with late corrections: the entry of a block that is used or held stays where it is until it comes
    to the front, and one that is no longer the block's is skipped there.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._followers: dict[bytes, int] = {}
        """The number of blocks right after one, which the tier need not have."""
        self._entries = 0
        self._places = 0
        """Places in the queues that entries take, valid or not. A queue that was thrown away may still count."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: object) -> bool:
        return digest in self._blocks

    def remove(self, digest: bytes) -> None:
        """See Retention."""
        if (block := self._blocks.get(digest)) is not None:
            self._drop(block)

    def hold(self, digest: bytes) -> None:
        """See Retention."""
        if (block := self._blocks.get(digest)) is not None:
            block.num_pins += 1

    def release(self, digest: bytes) -> None:
        """See Retention."""
        if (block := self._blocks.get(digest)) is not None:
            self._unpin(block)

    def pop_victim_for(self, digest: bytes, facts: BlockFacts, now: float) -> bytes | None:
        """See Retention."""
        self._enter(digest, facts, now)
        victim = self.pop_victim(now)
        if victim != digest:
            self.remove(digest)
        return victim

    def _insert(self, digest: bytes, facts: BlockFacts, now: float) -> Block:
        if digest in self._blocks:
            raise KeyError(f"the tier has block {digest.hex()} already")
        block = self._blocks[digest] = Block(digest, facts, now)
        block.num_pins = self._followers.get(digest, 0)
        if parent := facts.parent:
            self._followers[parent] = self._followers.get(parent, 0) + 1
            if (before := self._blocks.get(parent)) is not None:
                before.num_pins += 1
        return block

    def _drop(self, block: Block) -> None:
        del self._blocks[block.digest]
        block.entry = 0
        if not (parent := block.parent):
            return
        self._followers[parent] -= 1
        if not self._followers[parent]:
            del self._followers[parent]
        if (before := self._blocks.get(parent)) is not None:
            self._unpin(before)

    def _unpin(self, block: Block) -> None:
        block.num_pins -= 1
        if not block.num_pins and not block.entry:
            self._queue(block)

    def _entry(self, block: Block) -> Entry:
        """Make the block's valid entry."""
        self._tidy()  # here, because a tier that is never full drops nothing to make room
        self._entries += 1
        block.entry = self._entries
        return block.used_at, -block.position, self._entries, block

    def _move(self, block: Block, kind: int) -> None:
        """Make a block one of another kind, with another queue."""
        block.kind = kind
        if block.entry:
            block.entry = 0
            if not block.num_pins:
                self._queue(block)

    def _front(self, queue: list[Entry]) -> Block | None:
        """Return the block of a queue that was used least recently, which stays in it; None if the queue is empty."""
        while queue:
            used_at, _, number, block = queue[0]
            is_valid = block.entry == number
            if is_valid and not block.num_pins and block.used_at == used_at:
                return block
            heappop(queue)
            self._places -= 1
            if is_valid:
                self._move(block, block.kind)
        return None

    def _push(self, queue: list[Entry], entry: Entry) -> None:
        self._places += 1
        heappush(queue, entry)

    def _tidy(self) -> None:
        """Clear the queues when most of their entries are not valid. A step waits for it, so it is not done where
        taking from the front clears them well enough."""
        if self._places <= MOST_PLACES * len(self) + MIN_ENTRIES:
            return
        self._places = 0
        for queue in self._queues():
            queue[:] = [entry for entry in queue if entry[3].entry == entry[2]]
            heapify(queue)
            self._places += len(queue)

    @abstractmethod
    def _enter(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        """Keep a block, perhaps for a comparison only."""

    @abstractmethod
    def pop_victim(self, now: float) -> bytes | None:
        """See Retention."""

    @abstractmethod
    def _queue(self, block: Block) -> None:
        """Queue a block that can be dropped."""

    @abstractmethod
    def _queues(self) -> Iterable[list[Entry]]: ...


class LeastRecent(Chains):
    """Drops what was used least recently, and of what one prompt used, its end first."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Entry] = []

    def add(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        """See Retention."""
        self._enter(digest, facts, now)

    def _enter(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        block = self._insert(digest, facts, now)
        if not block.num_pins:
            self._queue(block)

    def use(self, digests: Sequence[bytes], now: float) -> None:
        """See Retention."""
        for digest in digests:
            if (block := self._blocks.get(digest)) is not None:
                block.used_at = now

    def end_turn(self, session: str, chain: Sequence[bytes], now: float) -> None:
        """See Retention. The end counts as a use, and the session does not count."""
        self.use(chain, now)

    def supersede(self, digests: Iterable[bytes]) -> None:
        """See Retention. Such blocks are not used again, and that is all that counts here."""

    def pop_victim(self, now: float) -> bytes | None:
        """See Retention."""
        if (block := self._front(self._waiting)) is None:
            return None
        self._drop(block)
        return block.digest

    def _queue(self, block: Block) -> None:
        self._push(self._waiting, self._entry(block))

    def _queues(self) -> Iterable[list[Entry]]:
        return (self._waiting,)
