"""Owns the newest turns of the conversations whose blocks a tier has, and what a new turn makes superfluous.
Never knows what the tier holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_BRANCHES = 8
"""Lines of talk of one session at a time, such as an agent's and its helpers'."""
LEAST_LENGTH = 0.5
"""A turn of less than this share of another's length does not go on from it."""


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
        """Note a session's newest turn, and return those digests of the turn that it goes on from which it does not
        have. `most`: how many digests to remember.

        It goes on from the turn that it shares most with, be it only the system prompt: where thoughts are left out of
        a prompt, all behind the first of them has moved. A much shorter one is a helper's, which begins alike. One that
        shares as much with several goes on from none: they are conversations of one application, which names all alike.
        """
        if not chain:
            return ()
        found = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = found
        found.num_turns += 1
        superseded: Sequence[bytes] = ()
        shares = [_num_shared(branch, chain) for branch in found.branches]
        shared = max(shares, default=0)
        number = shares.index(shared) if shared and shares.count(shared) == 1 else None
        if number is not None and len(chain) >= LEAST_LENGTH * len(found.branches[number]):
            before = found.branches.pop(number)
            self._num_digests -= len(before)
            superseded = before[shared:]
        found.branches.append(tuple(chain))
        self._num_digests += len(chain)
        if len(found.branches) > MAX_BRANCHES:
            self._num_digests -= len(found.branches.pop(0))
        self._forget(most)
        return superseded

    def _forget(self, most: int) -> None:
        while self._num_digests > most and len(self._sessions) > 1:
            _, oldest = self._sessions.popitem(last=False)
            self._num_digests -= sum(map(len, oldest.branches))


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
