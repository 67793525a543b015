"""Owns the leader's hold on the other ranks: their processes and its end of the group, from the start to the end.
Never runs a step: the leading model does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.parallel.messages import End, Start, encode
from engine.parallel.processes import Followers, RankProcess
from kernels.collectives.group import Group, RankLostError

logger = logging.getLogger(__name__)

_END_S = 10.0
"""How long a follower may take to end once it was told."""


class Ranks:
    """All ranks of an engine but this one, the leader."""

    def __init__(self, group: Group, processes: Sequence[RankProcess]) -> None:
        """processes: of ranks 1 and up."""
        self._group = group
        self.processes = processes
        self._lost: str | None = None
        self._have_met = False
        self._followers = Followers(processes, self._lose)

    def _lose(self, rank: int, why: str) -> None:
        self._lost = why
        logger.error("%s", why)

    def why_lost(self) -> str | None:
        """Say which rank's process has ended, and how; None while all run."""
        return self._lost

    def late_s(self) -> Sequence[float]:
        """Return how many seconds the others have waited for each rank so far."""
        return self._group.late_s

    def meet(self, digest: str) -> None:
        """Return once every rank has loaded its part of the model. digest: of the model's files here.

        Raises:
            RankLostError: a rank has ended, or its model's files are others.
        """
        self._group.join(self.why_lost)
        self._have_met = True
        self._group.send(encode(Start(digest)))
        self._group.all_reduce(torch.zeros(1))

    def end(self) -> None:
        """End the other ranks, and give back what the group holds."""
        self._followers.expect_end()
        self._followers.end(_END_S if self._tell_end() else 0.0)
        self._group.close()

    def _tell_end(self) -> bool:
        """Return whether the other ranks know that they are to end."""
        if not self._have_met:
            return False
        try:
            self._group.send(encode(End()))
        except RankLostError:  # those that are left see it, too
            return False
        return True
