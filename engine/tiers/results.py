"""Owns the results of moves until they are taken, and the call that says that there are some.
Never starts or ends a move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from threading import Lock

from engine.kv_tiers import MoveKind, MoveResult


class Results:
    """A list that threads append to and the step thread takes. `wake` is called when it stops being empty."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._results: list[MoveResult] = []
        self._wake: Callable[[], None] = _nothing

    def put(self, results: Iterable[MoveResult]) -> None:
        """Append results, and wake."""
        self.add(results)()

    def add(self, results: Iterable[MoveResult]) -> Callable[[], None]:
        """Append results. Return what the caller is to call once it has no lock that the step thread may wait for: to
        wake may take one that the step thread has."""
        with self._lock:
            was_empty = not self._results
            self._results += results
            return self._wake if was_empty and self._results else _nothing

    def take(self) -> list[MoveResult]:
        with self._lock:
            taken, self._results = self._results, []
            return taken

    def remove_loads(self, move_ids: Collection[int]) -> None:
        """Drop the results of loads that are of no use any more."""
        with self._lock:
            self._results = [
                result
                for result in self._results
                if result.move.kind is not MoveKind.LOAD or result.move.move_id not in move_ids
            ]

    def on_put(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on, and now if there are results already."""
        with self._lock:
            self._wake = wake
            is_late = bool(self._results)
        if is_late:
            wake()


def _nothing() -> None: ...
