"""Starts the ranks of a group, each a process that runs one function of a test, and hands on what they return.
Never leaves a process behind: those that are left are killed, stopped ones too."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kernels.collectives.group import Group, RankLostError

ENDING_S = 30.0
"""How long ranks may take to return: far longer than they need, and not a limit that a test is about."""

Tell = Callable[[Any], None]
"""How a rank tells the test something before it returns."""
MakeGroup = Callable[[int, int], Group]
"""From a rank and the number of ranks to the rank's end; it is called in the rank's process."""
Job = Callable[..., Any]
"""What a rank does: (group, tell, *arguments) -> what the test gets. It may raise RankLostError."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "kernels.collectives.shared_memory", "tests.kernels.collectives.jobs"])


class LostResult(str):
    """The message of the RankLostError that a rank's job ended with."""


@dataclass
class Ranks:
    pids: list[int]
    _pipes: list[Connection]

    def told(self, rank: int, timeout_s: float = ENDING_S) -> Any:
        """Return the next thing that a rank tells or returns."""
        if not self._pipes[rank].poll(timeout_s):
            raise TimeoutError(f"Rank {rank} told nothing within {timeout_s} s.")
        try:
            kind, value = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            raise AssertionError(f"Rank {rank} has ended without a word.") from None
        assert kind != "failed", value
        return value

    def results(self, *but: int) -> list[Any]:
        """Return what all ranks returned, except some."""
        return [self.told(rank) for rank in range(len(self.pids)) if rank not in but]

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)


@contextmanager
def ranks(make: MakeGroup, size: int, job: Job, *arguments: Any) -> Iterator[Ranks]:
    """Start `size` processes. All that is given must be pickled by name or by value."""
    pipes = [_context.Pipe() for _ in range(size)]
    processes = [
        _context.Process(target=_run, args=(pipes[rank][1], make, rank, size, job, arguments)) for rank in range(size)
    ]
    try:
        for process, pipe in zip(processes, pipes, strict=True):
            process.start()
            pipe[1].close()  # or its end would not be seen here
        yield Ranks([process.pid or 0 for process in processes], [pipe[0] for pipe in pipes])
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
                process.close()


def run_ranks(make: MakeGroup, size: int, job: Job, *arguments: Any) -> list[Any]:
    """Return what the job returned in each rank."""
    with ranks(make, size, job, *arguments) as started:
        return started.results()


def _run(pipe: Connection, make: MakeGroup, rank: int, size: int, job: Job, arguments: tuple[Any, ...]) -> None:
    try:
        group = make(rank, size)
        try:
            result = job(group, partial(_send, pipe, "told"), *arguments)
        finally:
            group.close()
    except RankLostError as error:
        result = LostResult(error)
    except BaseException as error:  # whatever it is, the test shows it
        _send(pipe, "failed", f"rank {rank}: {type(error).__name__}: {error}")
        raise
    _send(pipe, "returned", result)


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """Tensors by value: multiprocessing's own way needs the sender to live on."""
    pipe.send_bytes(pickle.dumps((kind, value)))
