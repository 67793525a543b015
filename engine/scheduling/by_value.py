"""Owns what a tier drops by value: the time that computing a block again takes, times how soon a prompt may have it.
Never decides what is stored or loaded, and never holds a block's KV."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from math import frexp, inf, sqrt
from typing import NamedTuple

from engine.scheduling.conversations import Conversations
from engine.scheduling.retention import Block, BlockFacts, Chains, Entry
from engine.scheduling.return_times import ReturnTimes
from engine.scheduling.sorted_list import SortedList

PROTECTION = 2.0
"""A block of a tenant that has no more than an equal share counts so many times."""
MAX_LARGE = 4
"""Tenants above their share that are looked at, the largest."""
GHOSTS = 2
"""Dropped blocks that are remembered, as a multiple of those that are there, to learn from their return."""
MAX_DIGESTS = 4
"""Digests of conversations' newest turns that are remembered, likewise."""
MEMORY = 4
"""Observations of a kind that are remembered, likewise."""
LEAST = 4096
"""A tier with fewer blocks remembers as much as one with so many."""
LOOK_AGAIN = 64
"""Blocks that are dropped from one queue before all are compared again."""
LOOK_AGAIN_S = 1.0

ONCE, USED, OFTEN, FIRST_TURN, SECOND_TURN, LATER_TURN, SUPERSEDED = range(7)
"""Kinds: without a session, blocks that were never used since they were stored, used once, or more often; in a session,
blocks of its first turn, of its second, and of later ones; and blocks that a newer turn has superseded."""

Key = tuple[int, int]
"""A kind, and the octave of the weight."""
Queues = dict[Key, list[Entry]]


TOOL_S, USER_S = 5.0, 120.0
"""A tool's time to answer, and a user's."""


def _at_the_start() -> list[ReturnTimes]:
    """What is expected of each kind before anything was observed, as if of so many blocks."""
    return [
        ReturnTimes([(USER_S, 160)], never=352),
        ReturnTimes([(USER_S, 256)], never=256),
        ReturnTimes([(USER_S, 384)], never=128),
        ReturnTimes([(TOOL_S, 320), (USER_S, 128)], never=64),
        ReturnTimes([(TOOL_S, 320), (USER_S, 160)], never=32),
        ReturnTimes([(TOOL_S, 320), (USER_S, 176)], never=16),
    ]


@dataclass(slots=True)
class _Choice:
    """A queue to drop from, to compare all queues less often."""

    queue: list[Entry]
    tenant: str
    most: float
    """What its blocks may be worth: as much as the first of the next queue was."""
    until: float
    num_left: int


class _Found(NamedTuple):
    """A block that may be dropped, and what it is worth."""

    value: float
    block: Block
    choice: _Choice


class ByValue(Chains):
    """Drops superseded blocks first, and then what is worth least.

    A block's worth is the root of the seconds that computing it again takes, times the rate at which blocks of its kind
    are used again after as long without a use (ReturnTimes). With the seconds themselves, the blocks of long prompts
    pushed out so many of short ones that no time was saved. Tenants with more than an equal share of the tier lose
    blocks first, unless the others' are worth far less.
    """

    def __init__(self, look_again: int = LOOK_AGAIN) -> None:
        """`look_again`: 1 compares all queues for each block."""
        super().__init__()
        self._look_again = look_again
        self._times = _at_the_start()
        self._conversations = Conversations()
        self._superseded: list[Entry] = []
        self._of_all: Queues = {}
        self._of_tenant: dict[str, Queues] = {}
        self._shares = _Shares()
        self._ghosts: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._mean_weight = 0.0
        self._choice: _Choice | None = None

    # --- what the tier has --------------------------------------------------------------------------------------------

    def add(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        """See Retention."""
        self._enter(digest, facts, now)
        self._learn_return(digest, now)

    def _enter(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        block = self._insert(digest, facts, now)
        block.weight = self._weight(facts.cost_s)
        block.octave = frexp(block.weight)[1]
        if facts.session:
            block.kind = _kind_of_turn(self._conversations.num_turns(facts.session))
        ghost = self._ghosts.get(digest)
        if ghost is not None and ghost[0] < OFTEN and not facts.session:
            block.kind = ghost[0] + 1
        if self._shares.enter(facts.tenant):
            self._queue_by_tenant()
        if not block.num_pins:
            self._queue(block)

    def _learn_return(self, digest: bytes, now: float) -> None:
        """Learn that a block that was dropped has come back, if it was remembered."""
        if (ghost := self._ghosts.pop(digest, None)) is not None:
            kind, used_at = ghost
            self._times[kind].returned(now - used_at)

    def _weight(self, cost_s: float | None) -> float:
        """Return the root of a cost; if nobody knows it, about the mean of the others."""
        if cost_s is None:
            return self._mean_weight or 1.0
        weight = sqrt(cost_s)
        self._mean_weight += (weight - self._mean_weight) * (0.01 if self._mean_weight else 1.0)
        return weight

    def use(self, digests: Sequence[bytes], now: float) -> None:
        """See Retention."""
        blocks, kind, used_at, count = self._blocks, ONCE, now, 0
        for digest in digests:
            if (block := blocks.get(digest)) is None:
                continue
            if block.kind != kind or block.used_at != used_at:
                self._returned(kind, now - used_at, count)
                kind, used_at, count = block.kind, block.used_at, 0
            count += 1
            block.used_at = now
            if kind < OFTEN:
                self._move(block, kind + 1)
            elif kind == SUPERSEDED:
                self._move(block, OFTEN)
        self._returned(kind, now - used_at, count)

    def _returned(self, kind: int, seconds: float, count: int) -> None:
        if count and kind != SUPERSEDED:
            self._times[kind].returned(seconds, count)

    def end_turn(self, session: str, chain: Sequence[bytes], now: float) -> None:
        """See Retention."""
        most = MAX_DIGESTS * max(len(self), LEAST)
        before = self._conversations.end_turn(session, chain, most) if session else ()
        kind = _kind_of_turn(self._conversations.num_turns(session))
        for digest in chain:
            if (block := self._blocks.get(digest)) is None:
                if (ghost := self._ghosts.get(digest)) is not None:
                    self._ghosts[digest] = ghost[0], now
                continue
            block.used_at = now
            if block.kind == SUPERSEDED or (block.session and (block.kind != kind or block.session != session)):
                self._take_turn(block, session, kind)
        blocks = self._blocks
        self.supersede(  # but not what others have, too
            digest for digest in before if (block := blocks.get(digest)) is not None and block.session == session
        )

    def _take_turn(self, block: Block, session: str, kind: int) -> None:
        if session and block.session == session:
            self._move(block, kind)
        else:  # others have it, too
            block.session = ""
            self._move(block, OFTEN)

    def supersede(self, digests: Iterable[bytes]) -> None:
        """See Retention."""
        for digest in digests:
            if (block := self._blocks.get(digest)) is not None and block.kind != SUPERSEDED:
                self._move(block, SUPERSEDED)

    def _drop(self, block: Block) -> None:
        self._shares.leave(block.tenant)
        if block.tenant not in self._shares:
            self._of_tenant.pop(block.tenant, None)
        super()._drop(block)
        if queue := self._of_tenant.get(block.tenant, {}).get((block.kind, block.octave)):
            self._front(queue)  # which takes what is no longer valid from it

    # --- what it drops ------------------------------------------------------------------------------------------------

    def pop_victim(self, now: float) -> bytes | None:
        """See Retention."""
        block = self._front(self._superseded) or self._chosen(now) or self._choose(now)
        if block is None:
            return None
        if block.kind != SUPERSEDED:
            self._remember(block, now)
        self._drop(block)
        return block.digest

    def _remember(self, block: Block, now: float) -> None:
        ghosts = self._ghosts
        self._learn_return(block.digest, now)  # of a newcomer that was not let in
        ghosts[block.digest] = block.kind, block.used_at
        if len(ghosts) > GHOSTS * max(len(self), LEAST):
            _, (kind, used_at) = ghosts.popitem(last=False)
            self._times[kind].gone(now - used_at)

    def _chosen(self, now: float) -> Block | None:
        """Return the next block of the queue that was chosen last, if that still holds."""
        choice = self._choice
        if choice is None or not choice.num_left or now > choice.until:
            return None
        block = self._front(choice.queue)
        if block is None or block.tenant != choice.tenant or self._value(block, now) > choice.most:
            return None
        choice.num_left -= 1
        return block

    def _choose(self, now: float) -> Block | None:
        self._forget()
        found = self._least(self._of_all, now)
        if found is None:
            return None
        if self._shares.several and not self._shares.is_above(found.block.tenant):
            found = self._rather_of_large(found, now)
        self._choice = found.choice
        return found.block

    def _rather_of_large(self, found: _Found, now: float) -> _Found:
        """Return what a tenant above its share loses in the place of another's block; that block if it is worth far
        less."""
        large = (self._least(self._of_tenant.get(tenant, {}), now) for tenant in self._shares.largest(MAX_LARGE))
        least = min((other for other in large if other is not None), key=lambda other: other.value, default=found)
        return least if least.value < PROTECTION * found.value else found

    def _forget(self) -> None:
        most = MEMORY * max(len(self), LEAST)
        for times in self._times:
            if times.total > most:
                times.forget_half()

    def _least(self, queues: Queues, now: float) -> _Found | None:
        """Return the first block of a queue that is worth least."""
        best: tuple[float, float, int, Key] | None = None
        second = inf
        for key in tuple(queues):
            if (block := self._front(queues[key])) is None:
                del queues[key]
                continue
            one = self._value(block, now), block.used_at, -block.position, key
            if best is None or one < best:
                best, second = one, second if best is None else best[0]
            else:
                second = min(second, one[0])
        if best is None:
            return None
        value, _, _, key = best
        block = queues[key][0][3]
        choice = _Choice(queues[key], block.tenant, second, now + LOOK_AGAIN_S, self._look_again - 1)
        return _Found(value, block, choice)

    def _value(self, block: Block, now: float) -> float:
        return block.weight * self._times[block.kind].rate(now - block.used_at)

    # --- queues -------------------------------------------------------------------------------------------------------

    def _queue(self, block: Block) -> None:
        entry = self._entry(block)
        if block.kind == SUPERSEDED:
            self._push(self._superseded, entry)
            return
        key = block.kind, block.octave
        self._push(self._of_all.setdefault(key, []), entry)
        if self._shares.several:
            self._push(self._of_tenant.setdefault(block.tenant, {}).setdefault(key, []), entry)

    def _queue_by_tenant(self) -> None:
        """Queue what is there by tenant, too, once there is more than one."""
        for block in self._blocks.values():
            if block.entry:
                block.entry = 0
                if not block.num_pins:
                    self._queue(block)

    def _queues(self) -> Iterator[list[Entry]]:
        yield self._superseded
        for queues in joined((self._of_all,), self._of_tenant.values()):
            yield from queues.values()


def _kind_of_turn(num_turns: int) -> int:
    return min(FIRST_TURN + max(num_turns - 1, 0), LATER_TURN)


class _Shares:
    """How many blocks each tenant has."""

    def __init__(self) -> None:
        self.several = False
        """Whether there was ever more than one tenant."""
        self._sizes: dict[str, int] = {}
        self._order: SortedList[tuple[int, str]] = SortedList()
        """Sizes with a minus, and tenants."""
        self._total = 0

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._sizes

    def enter(self, tenant: str) -> bool:
        """Count a block. Return whether there are several tenants for the first time."""
        self._resize(tenant, 1)
        if self.several or len(self._sizes) == 1:
            return False
        self.several = True
        for name, size in self._sizes.items():
            self._order.add((-size, name))
        return True

    def leave(self, tenant: str) -> None:
        self._resize(tenant, -1)

    def _resize(self, tenant: str, change: int) -> None:
        self._total += change
        before = self._sizes.get(tenant, 0)
        now = before + change
        if now:
            self._sizes[tenant] = now
        else:
            del self._sizes[tenant]
        if self.several:
            if before:
                self._order.remove((-before, tenant))
            if now:
                self._order.add((-now, tenant))

    def is_above(self, tenant: str) -> bool:
        """Whether a tenant has more than an equal share."""
        return self._sizes[tenant] * len(self._sizes) > self._total

    def largest(self, most: int) -> list[str]:
        """Return up to `most` tenants above their share, the largest first."""
        found: list[str] = []
        for _, tenant in self._order:
            if len(found) == most or not self.is_above(tenant):
                break
            found.append(tenant)
        return found
