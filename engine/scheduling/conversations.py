"""Owns the newest turns of the conversations whose blocks a tier has, and what a new turn makes superfluous.
Never knows what the tier holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_BRANCHES = 8
"""Lines of talk of one session at a time, such as an agent's and its helpers'."""
LEAST_SHARE = 0.5


class _Session:
    __slots__ = ("branches", "num_turns")

    def __init__(self) -> None:
        self.num_turns = 0
        self.branches: list[Sequence[bytes]] = []
        """The chain of each branch's newest turn, the newest last."""


class Conversations:
    """The sessions, least recently ended first. Those are forgotten if the chains get too long together."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._num_digests = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def num_turns(self, session: str) -> int:
        found = self._sessions.get(session)
        return 0 if found is None else found.num_turns

    def end_turn(self, session: str, chain: Sequence[bytes], most: int) -> Sequence[bytes]:
        """Note a session's newest turn, and return the digests of the turn that it goes on from which are not its own.
        `most`: how many digests to remember."""
        found = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = found
        found.num_turns += 1
        superseded: Sequence[bytes] = ()
        shared, number = max(
            ((_num_shared(branch, chain), number) for number, branch in enumerate(found.branches)), default=(0, -1)
        )
        if shared and goes_on(len(found.branches[number]), len(chain), shared):
            before = found.branches.pop(number)
            self._num_digests -= len(before)
            superseded = before[shared:]
        found.branches.append(chain)
        self._num_digests += len(chain)
        if len(found.branches) > MAX_BRANCHES:
            self._num_digests -= len(found.branches.pop(0))
        self._forget(most)
        return superseded

    def _forget(self, most: int) -> None:
        while self._num_digests > most and len(self._sessions) > 1:
            _, oldest = self._sessions.popitem(last=False)
            self._num_digests -= sum(map(len, oldest.branches))


def goes_on(num_before: int, num_now: int, num_shared: int) -> bool:
    """Whether a turn goes on from another one of its session, rather than being a helper's that begins alike. It has
    half of the blocks, or is as long: thoughts were left out of it, and all behind the first of them has moved."""
    return num_shared >= LEAST_SHARE * num_before or num_now >= LEAST_SHARE * num_before


def _num_shared(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return the length of the common prefix of two chains. A digest names all before it, too, so halving finds it."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
