"""Decides which engine replicas are silent: not heard of for too long, or late with a step.
Never reads a clock. It counts its own looks, so that a process that was itself suspended considers nobody silent."""

from __future__ import annotations

from collections.abc import Iterable

LOOK_S = 0.1


class Silence:
    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long an engine may be silent. `look` must be called every LOOK_S."""
        self._most = patience_s / LOOK_S
        self._looks: dict[str, int] = {}  # by engine: the looks since it was last heard of
        self._late: set[str] = set()

    def heard(self, engine: str, is_late: bool | None = None) -> None:
        """Note that something came from an engine. `is_late`: whether it is late with a step; only a beat says so."""
        self._looks[engine] = 0
        if is_late:
            self._late.add(engine)
        elif is_late is not None:
            self._late.discard(engine)

    def expect(self, engine: str) -> None:
        """Note that a call was sent to an engine. If it was never heard of, its silence counts from now on."""
        self._looks.setdefault(engine, 0)

    def look(self) -> None:
        for engine in self._looks:
            self._looks[engine] += 1

    def keep(self, engines: Iterable[str]) -> None:
        """Forget all other engines."""
        gone = self._looks.keys() - set(engines)
        for engine in gone:
            del self._looks[engine]
        self._late -= gone

    @property
    def known(self) -> frozenset[str]:
        """The engines that were heard of, or are expected."""
        return frozenset(self._looks)

    @property
    def silent(self) -> frozenset[str]:
        """The engines that get no new requests, and lose their streams to others."""
        return frozenset(self._late).union(engine for engine, looks in self._looks.items() if looks > self._most)
