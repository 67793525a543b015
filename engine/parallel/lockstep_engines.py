"""Owns the leader's hold on the ranks that have a mixture's experts between them: which has a request, and their end.
Never runs a step, and never moves a request from one rank to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from engine.async_engine import AsyncEngine
from engine.parallel.group_ranks import GroupRanks
from engine.parallel.processes import Followers
from engine.parallel.rank_messages import End, Left, Opened
from engine.parallel.remote_engine import RemoteEngine
from engine.protocol import Event, Submission
from kernels.collectives.group import LEADER

_END_S = 10.0
"""How long a rank may take to end once it was told."""


class LockstepEngines:
    """The ranks of a mixture. They end together, when one is shut down, fails or does not arrive."""

    def __init__(
        self, first: AsyncEngine, others: Sequence[RemoteEngine], followers: Followers, ranks: GroupRanks
    ) -> None:
        """first: this process's rank."""
        self.first = first
        self.others = others
        self._followers = followers
        self._ranks = ranks
        self._num_live = 0  # requests of the first rank

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    async def stream(self, submission: Submission, rank: int | None = None) -> AsyncGenerator[list[Event], None]:
        """See AsyncEngine.stream. rank: that serves the request; None: the one with the fewest live requests.

        Raises: as AsyncEngine.stream, and EngineError before the first item once a rank is lost.
        """
        await self.check_health()  # no rank outlives another, though the news may still be on its way
        if rank is None:
            live = [self._num_live, *(other.num_live for other in self.others)]
            rank = live.index(min(live))
        if rank:
            async for events in self.others[rank - 1].stream(submission):
                yield events
            return
        self._num_live += 1
        try:
            async for events in self.first.stream(submission):
                yield events
        finally:
            self._num_live -= 1

    async def drain(self) -> None:
        """Refuse new requests, and return when the last one of any rank has ended."""
        await asyncio.gather(self.first.drain(), *(other.drain() for other in self.others))

    async def check_health(self) -> None:
        """See AsyncEngine.check_health: no rank outlives another."""
        await self.first.check_health()

    def shutdown(self) -> None:
        """Fail what is live, and end all ranks. Idempotent."""
        self._followers.expect_end()
        self.first.shutdown()
        for other in self.others:
            if other.line is not None:
                other.line.send(End())
        self._followers.end(_END_S)
        for other in self.others:
            other.lose("The engine was shut down.")
            if other.line is not None:
                other.line.close()
                other.line = None

    # --- the lines' threads -------------------------------------------------------------------------------------------

    def hear(self, rank: int, message: Any) -> None:
        """Take what a rank says, and pass on what is for all."""
        if isinstance(message, Opened):
            self._ranks.opened(message.round)
            self.tell(message, but=rank)
        elif isinstance(message, Left):
            self._ranks.lose(message.reason)
            self.tell(message, but=rank)
        else:
            self.others[rank - 1].hear(message)

    def lose(self, rank: int, reason: str) -> None:
        """A rank's process has ended: end all others."""
        self._ranks.lose(reason)
        self.tell(Left(reason), but=rank)
        self.others[rank - 1].lose(f"The ranks have stopped together: {reason}.")

    def tell(self, message: Opened | Left, but: int = LEADER) -> None:
        for other in self.others:
            if other.rank != but and other.line is not None:
                other.line.send(message)
