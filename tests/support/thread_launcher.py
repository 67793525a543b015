"""Runs the followers of an engine as threads of the test's process, which start at once and share its imports.
Never hides how a follower ended: `poll` says it, as for a process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.build.follower import follow


class ThreadLauncher:
    """An engine.parallel.processes.RankLauncher."""

    def __init__(self, remote_host: str | None = None, *, here: Sequence[int] | None = None) -> None:
        """here: the ranks of which the leader believes that they are on its machine, and the others on another; None:
        all are."""
        self.remote_host = remote_host
        self.ranks: list[RankThread] = []
        self._here = here

    def ranks_beside(self, rank: int, size: int) -> Sequence[int]:
        here = range(size) if self._here is None else self._here
        return here if rank in here else [other for other in range(size) if other not in here]

    def start(self, rank: int, specification: bytes) -> RankThread:
        self.ranks.append(RankThread(rank, specification))
        return self.ranks[-1]


class RankThread:
    """A RankProcess."""

    def __init__(self, rank: int, specification: bytes) -> None:
        self.error: BaseException | None = None
        self._rank = rank
        self._thread = threading.Thread(target=self._run, args=(specification,), name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def _run(self, specification: bytes) -> None:
        try:
            follow(specification)
        except BaseException as error:  # noqa: BLE001 (as a process's end, `poll` says it)
            self.error = error

    def poll(self) -> str | None:
        if self._thread.is_alive():
            return None
        return f"rank {self._rank} ended " + ("in order" if self.error is None else f"with {self.error!r}")

    def kill(self) -> None:
        """A thread cannot be killed; one whose group was given up or closed ends by itself."""
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "a follower goes on without its leader"
