"""Owns which engine replicas are silent: not heard of for too long, or late with a step.
Never reads a clock. It counts its own looks, so that a process which stood still itself takes nobody for silent."""

from __future__ import annotations

from collections.abc import Iterable

LOOK_S = 0.1


class Silence:
    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long an engine may be silent; `look` is to be called once every LOOK_S."""
        self._most = patience_s / LOOK_S
        self._looks: dict[str, int] = {}  # by engine: since it was last heard
        self._late: set[str] = set()

    def heard(self, engine: str, is_late: bool | None = None) -> None:
        """Something came from that engine; with a beat, whether it is late."""
        self._looks[engine] = 0
        if is_late:
            self._late.add(engine)
        elif is_late is not None:
            self._late.discard(engine)

    def expect(self, engine: str) -> None:
        """A call was sent to that engine, which is to be heard of from now on, if it has never been."""
        self._looks.setdefault(engine, 0)

    def look(self) -> None:
        for engine in self._looks:
            self._looks[engine] += 1

    def keep(self, engines: Iterable[str]) -> None:
        """Forget all others."""
        gone = self._looks.keys() - set(engines)
        for engine in gone:
            del self._looks[engine]
        self._late -= gone

    @property
    def known(self) -> frozenset[str]:
        """Engines that have been heard of, or expected."""
        return frozenset(self._looks)

    @property
    def silent(self) -> frozenset[str]:
        """Engines that are sent nothing new, and whose streams move."""
        return frozenset(self._late).union(engine for engine, looks in self._looks.items() if looks > self._most)
