"""Owns the threads on which token masks are computed, each by one thread, and the limit of processor time of each.
Never interrupts a computation: one beyond its limit is given up, and its thread ends when it returns."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

LOOK_S = 0.005
"""How often a computation that is waited for is looked at."""

Value = TypeVar("Value")


def processor_time_s(thread: threading.Thread) -> float:
    """Return the processor time of a thread that is alive. It does not depend on what else the machine does, and so
    neither does an answer."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@dataclass(frozen=True, slots=True)
class Job(Generic[Value]):
    """`work` lets the interpreter's lock go, and may be as long as it likes; `limit_s` is how long it is waited for."""

    work: Callable[[], Value]
    limit_s: float
    group: Hashable = None
    """Jobs of a group may wait for each other: with one that is given up all of them are. None: of no group."""


@dataclass(slots=True)
class Outcome(Generic[Value]):
    """`is_late`: it was given up. Otherwise there is a value, or what was raised instead. `took_s`: processor time."""

    value: Value | None = None
    error: BaseException | None = None
    is_late: bool = False
    took_s: float = 0.0


class MaskWorkers:
    """The threads of one engine. `run` is called by one thread at a time."""

    def __init__(
        self, count: int, *, clock: Callable[[threading.Thread], float] = processor_time_s, look_s: float = LOOK_S
    ) -> None:
        """`clock`: the processor time that a thread has had."""
        self._workers = [_Worker() for _ in range(count)]
        self._clock = clock
        self._look_s = look_s
        weakref.finalize(self, _dismiss, self._workers)

    def run(self, jobs: Sequence[Job[Value]]) -> list[Outcome[Value]]:
        """Return when each job is done or given up."""
        batch = _Batch(jobs, self._clock)
        for worker in self._workers[: len(jobs)]:
            worker.give(batch)
        with batch.changed:
            while batch.num_open:
                if not batch.changed.wait(self._look_s):
                    for late in batch.give_up():
                        self._replace(late, batch)
        return batch.outcomes

    def _replace(self, late: _Worker, batch: _Batch[Any]) -> None:
        """What waits behind a job that was given up needs another thread."""
        other = _Worker()
        self._workers[self._workers.index(late)] = other
        other.give(batch)


def _dismiss(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.give(None)


class _Worker(threading.Thread):
    """Begins with its first batch. A daemon: a computation that was given up does not hold up the process's end."""

    def __init__(self) -> None:
        super().__init__(name="engine-mask", daemon=True)
        self._batches: SimpleQueue[_Batch[Any] | None] = SimpleQueue()

    def give(self, batch: _Batch[Any] | None) -> None:
        self._batches.put(batch)
        if batch is not None and self.ident is None:
            self.start()

    def run(self) -> None:
        while (batch := self._batches.get()) is not None:
            if not batch.work(self):
                return
            del batch  # its masks may be large


@dataclass(slots=True)
class _Batch(Generic[Value]):
    jobs: Sequence[Job[Value]]
    clock: Callable[[threading.Thread], float]
    changed: threading.Condition = field(default_factory=threading.Condition)
    outcomes: list[Outcome[Value]] = field(init=False)
    _num_begun: int = 0
    _closed: set[int] = field(default_factory=set)
    _running: dict[_Worker, tuple[int, float]] = field(default_factory=dict)
    """The number of the job, and the thread's clock when it began."""

    def __post_init__(self) -> None:
        self.outcomes = [Outcome() for _ in self.jobs]

    @property
    def num_open(self) -> int:
        return len(self.jobs) - len(self._closed)

    def work(self, worker: _Worker) -> bool:
        """Do jobs until all are begun; whether the thread is still wanted."""
        while (number := self._begin(worker)) is not None:
            done: Outcome[Value] = Outcome()
            try:
                done.value = self.jobs[number].work()
            except BaseException as error:  # noqa: BLE001 - told to whoever waits
                done.error = error
            if not self._end(worker, done):
                return False
        return True

    def _begin(self, worker: _Worker) -> int | None:
        with self.changed:
            while self._num_begun < len(self.jobs):
                number = self._num_begun
                self._num_begun += 1
                if number not in self._closed:
                    self._running[worker] = (number, self.clock(worker))
                    return number
            return None

    def _end(self, worker: _Worker, done: Outcome[Value]) -> bool:
        with self.changed:
            number, began = self._running.pop(worker, (None, 0.0))
            if number is None:
                return False
            done.took_s = self.clock(worker) - began
            self._close(number, done)
            return True

    def give_up(self) -> list[_Worker]:
        """Close jobs that are beyond their limit, and those of their groups; the threads that are in one. To be called
        with `changed` held."""
        late = {
            number
            for worker, (number, began) in self._running.items()
            if self.clock(worker) - began > self.jobs[number].limit_s
        }
        groups = {self.jobs[number].group for number in late} - {None}
        late |= {number for number, job in enumerate(self.jobs) if job.group in groups} - self._closed
        for number in sorted(late):
            self._close(number, Outcome(is_late=True))
        lost = [worker for worker, (number, _) in self._running.items() if number in late]
        for worker in lost:
            del self._running[worker]
        return lost

    def _close(self, number: int, outcome: Outcome[Value]) -> None:
        self.outcomes[number] = outcome
        self._closed.add(number)
        if not self.num_open:
            self.changed.notify()
