"""Owns the replicas of a simulated deployment, as Serve's controller does: their starts, drains, failures and cost.
Never decides how many there are or which of them gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from engine.protocol import ErrorCode, Submission
from loadtest.sim.replica import Replica
from loadtest.sim.routers import Router

MakeReplica = Callable[[str, int, Callable[[Replica], None]], Replica]
"""Makes a replica from its name, its zone, and the callback for when it has drained."""


class Deployment:
    """A replica is starting, running, draining and finally gone. It is paid for from its start until it is gone."""

    def __init__(
        self,
        make_replica: MakeReplica,
        router: Router,
        *,
        cold_start_s: float,
        drain_s: float,
        num_zones: int = 1,
        seed: int = 0,
    ) -> None:
        """`cold_start_s` is the mean time of a start; each takes up to a fifth more or less. After `drain_s`, the
        requests left at a draining replica have to move."""
        self._loop = asyncio.get_running_loop()
        self._make_replica = make_replica
        self._router = router
        self._cold_start_s, self._drain_s = cold_start_s, drain_s
        self._num_zones = num_zones
        self._random = Random(seed)
        self._num_started = 0
        self._starting: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self._draining: dict[str, tuple[Replica, asyncio.TimerHandle]] = {}
        self._arrivals: list[asyncio.Future[None]] = []
        self._paid_s, self._paid_until_s = 0.0, 0.0
        self.running: dict[str, Replica] = {}
        self.gone: list[Replica] = []
        self.target = 0
        self.on_change: list[Callable[[], None]] = []
        """Called after the running replicas have changed."""
        self.sizes: list[tuple[float, int]] = []
        """(seconds, running replicas) at each change of their number."""

    @property
    def num_paid(self) -> int:
        return len(self._starting) + len(self.running) + len(self._draining)

    @property
    def num_waiting(self) -> int:
        """The number of attempts that wait for any replica to run."""
        return len(self._arrivals)

    def replica_seconds(self) -> float:
        """Return the replica-seconds paid for until now."""
        now_s = self._loop.time()
        self._paid_s += self.num_paid * (now_s - self._paid_until_s)
        self._paid_until_s = now_s
        return self._paid_s

    # --- how many ---------------------------------------------------------------------------------------------------

    def scale(self, target: int, *, warm: bool = False) -> None:
        """Start or drain replicas until there are `target`. Replicas that are still starting are removed first, then
        those that began to run last. With `warm`, new ones run at once, as at the beginning of a simulation."""
        self.target = target
        while len(self._starting) + len(self.running) < target:
            self.start(warm=warm)
        while len(self._starting) + len(self.running) > target:
            self._remove_one()

    def start(self, *, warm: bool = False) -> str:
        """Start one more replica, even beyond the target, and return its name."""
        self.replica_seconds()
        name, zone = f"replica-{self._num_started}", self._num_started % self._num_zones
        self._num_started += 1
        if warm:
            self._run(name, zone)
            return name
        after_s = self._cold_start_s * self._random.uniform(0.8, 1.2)
        self._starting[name] = (zone, self._loop.call_later(after_s, self._run, name, zone))
        return name

    def _run(self, name: str, zone: int) -> None:
        self._starting.pop(name, None)
        self.running[name] = self._make_replica(name, zone, self._drained)
        self._changed()
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(None)

    def _remove_one(self) -> None:
        self.replica_seconds()
        if self._starting:
            _, (_, timer) = self._starting.popitem()
            timer.cancel()
        else:
            self.drain(next(reversed(self.running)))

    def _changed(self) -> None:
        self.sizes.append((self._loop.time(), len(self.running)))
        self._router.update(self.running)
        for listener in self.on_change:
            listener()

    # --- ends -------------------------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """Let a replica take no more requests. It is gone when its last request has left, or after `drain_s`."""
        replica = self.running.pop(name)
        self._changed()
        self._draining[name] = (replica, self._loop.call_later(self._drain_s, self._end_drain, replica))
        replica.drain()

    def _end_drain(self, replica: Replica) -> None:
        self._drained(replica, ErrorCode.DRAINING)

    def _drained(self, replica: Replica, code: ErrorCode = ErrorCode.DRAINING) -> None:
        if replica.name not in self._draining:
            return
        self.replica_seconds()
        _, timer = self._draining.pop(replica.name)
        timer.cancel()
        self.gone.append(replica)
        replica.stop(code)

    def kill(self, names: Sequence[str]) -> None:
        """Let these replicas fail at once, with all their requests, and then start others in their place."""
        self.replica_seconds()
        lost = [self.running.pop(name) for name in names]
        self._changed()  # before the failures, so that no request moves from one failing replica to another
        for replica in lost:
            self.gone.append(replica)
            replica.stop(ErrorCode.ENGINE_DEAD)
        self.scale(self.target)

    def kill_zone(self, zone: int) -> int:
        """Let all running replicas of a zone fail, and return their number."""
        names = [name for name, replica in self.running.items() if replica.zone == zone]
        self.kill(names)
        return len(names)

    async def upgrade(self, surge: int) -> None:
        """Replace every replica that runs now, `surge` at a time: start new ones first, then drain as many old ones."""
        old = list(self.running)
        while old := [name for name in old if name in self.running]:
            batch = old[:surge]
            fresh = [self.start() for _ in batch]
            while any(name in self._starting for name in fresh):  # noqa: ASYNC110  # a start may be given up, too
                await asyncio.sleep(1.0)
            for name in batch:
                if name in self.running:  # it may have failed meanwhile
                    self.drain(name)
            self.scale(self.target)  # after a failure, scaling to the target may have cancelled a start

    # --- where ------------------------------------------------------------------------------------------------------

    async def place(self, attempt: str, submission: Submission, avoid: Sequence[str]) -> Replica:
        """Return the replica that an attempt goes to. While none runs, wait, as Serve does."""
        while True:
            replica = self._router.choose(attempt, submission, avoid, self._loop.time())
            if replica is not None:
                return replica
            arrival: asyncio.Future[None] = self._loop.create_future()
            self._arrivals.append(arrival)
            await arrival

    def ended(self, attempt: str) -> None:
        self._router.ended(attempt)
