"""Owns the contract of the threads that compute masks: only what takes too long is given up, all else is waited for.
Never depends on how fast a machine is: a thread's clock is the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from engine.batch.mask_workers import Job, MaskWorkers, Outcome, processor_time_s

LOOK_S = 0.001
LIMIT_S = 10.0


class Clock:
    """A thread's time stands still, except for threads that called `wind`."""

    def __init__(self) -> None:
        self._wound: set[threading.Thread] = set()
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda looks: None

    def wind(self) -> None:
        """Let the calling thread's time be over from now on."""
        self._wound.add(threading.current_thread())

    def __call__(self, thread: threading.Thread) -> float:
        if threading.current_thread() is thread:  # its job begins
            return 0.0
        self.looks += 1
        self.on_look(self.looks)
        return 2 * LIMIT_S if thread in self._wound else LIMIT_S


@contextmanager
def stuck(clock: Clock) -> Iterator[Callable[[], str]]:
    """Yield a job that does not end before the test does, and whose time is over."""
    gate = threading.Event()

    def work() -> str:
        clock.wind()
        gate.wait()
        return "too late"

    try:
        yield work
    finally:
        gate.set()


def job(work: Callable[[], str], group: object = None) -> Job[str]:
    return Job(work, LIMIT_S, group)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_job_beyond_its_limit_is_given_up_alone(count: int) -> None:
    clock = Clock()
    workers = MaskWorkers(count, clock=clock, look_s=LOOK_S)
    with stuck(clock) as late:
        outcomes = workers.run([job(lambda: "a"), job(late), job(lambda: "b"), job(late), job(lambda: "c")])
        assert outcomes == [Outcome("a"), Outcome(is_late=True), Outcome("b"), Outcome(is_late=True), Outcome("c")]
        assert workers.run([job(lambda: "d")] * 3) == [Outcome("d")] * 3, "others work in their place"
    assert outcomes[1] == Outcome(is_late=True), "what it has found by now is nobody's"


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_within_its_limit_is_waited_for_however_often_it_is_looked_at(count: int) -> None:
    clock, gate = Clock(), threading.Event()
    clock.on_look = lambda looks: gate.set() if looks == 20 else None
    slow = job(lambda: str(gate.wait()))
    assert MaskWorkers(count, clock=clock, look_s=LOOK_S).run([slow, job(lambda: "b")]) == [
        Outcome("True"),
        Outcome("b"),
    ]
    assert clock.looks >= 20


@pytest.mark.parametrize("count", [1, 2, 3])
def test_with_a_job_that_is_given_up_go_those_that_may_wait_for_it(count: int) -> None:
    """Copies of one grammar share a lock, and the time of a thread that waits for it does not pass."""
    clock, lock = Clock(), threading.Lock()

    def behind() -> str:
        with lock:
            return "behind"

    with stuck(clock) as late:

        def holding() -> str:
            with lock:
                return late()

        jobs = [job(holding, "g"), job(behind, "g"), job(lambda: "b", "other"), job(behind, "g")]
        outcomes = MaskWorkers(count, clock=clock, look_s=LOOK_S).run(jobs)
    assert [outcome.is_late for outcome in outcomes] == [True, True, False, True]
    assert outcomes[2].value == "b"


@pytest.mark.parametrize("error", [ValueError("v"), KeyboardInterrupt()])
def test_what_a_job_raises_is_told_and_its_thread_goes_on(error: BaseException) -> None:
    def fails() -> str:
        raise error

    workers = MaskWorkers(1, clock=Clock())
    assert workers.run([job(fails), job(lambda: "b")]) == [Outcome(error=error), Outcome("b")]
    assert workers.run([job(lambda: "c")]) == [Outcome("c")]


def test_nothing_to_do_is_done_at_once() -> None:
    assert MaskWorkers(1).run([]) == []


def test_threads_end_with_their_owner() -> None:
    workers, seen = MaskWorkers(2, clock=Clock()), list[threading.Thread]()
    meet = threading.Barrier(2)

    def work() -> str:
        seen.append(threading.current_thread())
        meet.wait()
        return ""

    workers.run([job(work), job(work)])
    del workers
    for thread in seen:
        thread.join(timeout=20)
    assert len(set(seen)) == 2
    assert not any(thread.is_alive() for thread in seen)


def test_the_time_that_counts_is_the_threads_own() -> None:
    """No time passes for a thread that waits, however long it waits."""
    gate = threading.Event()
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    try:
        before = processor_time_s(threading.current_thread()), processor_time_s(waiting)
        while processor_time_s(threading.current_thread()) < before[0] + 0.02:
            pass
        assert processor_time_s(waiting) - before[1] < 0.02
    finally:
        gate.set()
        waiting.join()
