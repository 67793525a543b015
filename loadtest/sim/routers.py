"""Owns the choice of a replica for a simulated request: our router's own parts, and two common policies to compare.
Never queues a request: while no replica runs, the caller waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Protocol

from engine.protocol import Submission
from loadtest.sim.replica import Replica
from serve_app.routing.chooser import Chooser
from serve_app.routing.placement import NUM_DRAWN
from serve_app.settings.routing import RoutingSettings


class Router(Protocol):
    """Chooses among the replicas of its last `update`."""

    stats_period_s: float | None
    """The period at which `update` must be called with new reports; None means only when the replicas change."""

    def update(self, replicas: Mapping[str, Replica]) -> None:
        """Take over the replicas that run and accept requests."""
        ...

    def choose(self, attempt: str, submission: Submission, avoid: Sequence[str], now_s: float) -> Replica | None:
        """Return the replica for this attempt of a request; None if no replica runs."""
        ...

    def ended(self, attempt: str) -> None:
        """Note that the attempt has ended, in whatever way."""
        ...


class _Plain:
    """A router that needs no reports: it looks at the replicas themselves."""

    stats_period_s: float | None = None

    def __init__(self) -> None:
        self._replicas: list[Replica] = []

    def update(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = list(replicas.values())

    def ended(self, attempt: str) -> None:
        """Does nothing: no state is kept."""

    def _allowed(self, avoid: Sequence[str]) -> list[Replica]:
        if not avoid:
            return self._replicas
        return [replica for replica in self._replicas if replica.name not in avoid] or self._replicas


class RoundRobin(_Plain):
    """Each replica in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def choose(self, attempt: str, submission: Submission, avoid: Sequence[str], now_s: float) -> Replica | None:
        replicas = self._allowed(avoid)
        self._next += 1
        return replicas[self._next % len(replicas)] if replicas else None


class PowerOfTwo(_Plain):
    """Draws two replicas at random and chooses the one with fewer requests now: Serve's default with perfect probes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def choose(self, attempt: str, submission: Submission, avoid: Sequence[str], now_s: float) -> Replica | None:
        replicas = self._allowed(avoid)
        drawn = self._random.sample(replicas, min(NUM_DRAWN, len(replicas)))
        return min(drawn, key=lambda replica: replica.num_ongoing) if drawn else None


class PrefixAffine:
    """Routes as serve_app.routing.router does, with the same Chooser and with reports up to one period old."""

    def __init__(self, seed: int, block_size: int, settings: RoutingSettings | None = None) -> None:
        self._settings = settings or RoutingSettings()
        self.stats_period_s: float | None = self._settings.stats_period_s
        self._chooser = Chooser(self._settings, block_size, Random(seed))
        self._replicas: dict[str, Replica] = {}

    def update(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = dict(replicas)
        most = self._settings.published_blocks
        self._chooser.fleet.update({name: replica.routing_stats(most) for name, replica in self._replicas.items()})

    def choose(self, attempt: str, submission: Submission, avoid: Sequence[str], now_s: float) -> Replica | None:
        if not self._replicas:
            return None
        self._chooser.fleet.open(attempt)
        ranks = self._chooser.place(attempt, submission, self._replicas, now_s, avoid=avoid).ranks
        return self._replicas[ranks[0][0]]

    def ended(self, attempt: str) -> None:
        self._chooser.fleet.close(attempt)


ROUTERS: Mapping[str, Callable[[int, int], Router]] = {
    "prefix-affine": PrefixAffine,
    "power-of-two": lambda seed, block_size: PowerOfTwo(seed),
    "round-robin": lambda seed, block_size: RoundRobin(),
}
"""Constructors of routers; each takes a seed and the block size."""
