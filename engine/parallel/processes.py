"""Owns the start and the end of the followers' processes, and the watch over them.
Never decides what a follower computes: it only hands over the specification that it was given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

_POLL_S = 0.5


class RankProcess(Protocol):
    """A follower's process."""

    def poll(self) -> str | None:
        """Say which rank it was and how it ended; None while it runs."""

    def kill(self) -> None:
        """End it at once. A second call does nothing."""


class RankLauncher(Protocol):
    """Starts followers, each in a process of its own."""

    @property
    def remote_host(self) -> str | None:
        """This machine's name or address for ranks on other machines; None: all ranks are on this one."""

    def ranks_beside(self, rank: int, size: int) -> Sequence[int]:
        """Return which of `size` ranks are on the machine of this one, or will be; it is one of them."""

    def start(self, rank: int, specification: bytes) -> RankProcess:
        """Start a process that calls engine.build.follower.follow(specification), and do not wait for it."""


class SubprocessLauncher:
    """A RankLauncher for this machine: children of this process, which end with it."""

    remote_host: str | None = None

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        """gpus: CUDA's name of the GPU that each rank has. Empty: they have none."""
        self._gpus = gpus

    def ranks_beside(self, rank: int, size: int) -> Sequence[int]:
        return range(size)

    def start(self, rank: int, specification: bytes) -> Child:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[rank]
        command = [sys.executable, "-m", "engine.build.follower"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # logs go where ours go
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as `poll` says
            process.stdin.write(len(specification).to_bytes(8, "big") + specification)
            process.stdin.flush()  # it stays open: its end tells the child that this process is gone
        return Child(rank, process)


class RanksApart:
    """A RankLauncher for checks of engines that are not started: each rank is alone on a machine, as may be where ranks
    need not be on one."""

    remote_host: str | None = "127.0.0.1"

    def ranks_beside(self, rank: int, size: int) -> Sequence[int]:
        return [rank]

    def start(self, rank: int, specification: bytes) -> RankProcess:
        raise AssertionError("a check starts no rank")


class Child:
    """A RankProcess of this machine."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._rank = rank
        self._process = process

    def poll(self) -> str | None:
        status = self._process.poll()
        if status is None:
            return None
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the process of rank {self._rank} ended {how}"

    def kill(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()


OnLoss = Callable[[int, str], object]
"""Takes a rank whose process has ended, and how in words."""


class Followers:
    """The followers' processes, and a watch over them from a thread of its own: a dead one is known before the next
    step needs it, and before the group has formed."""

    def __init__(self, processes: Sequence[RankProcess], on_loss: OnLoss) -> None:
        """processes: of ranks 1 and up. on_loss: called at most once, with the rank that has ended, and how."""
        self._processes = processes
        self._on_loss = on_loss
        self._lost: tuple[int, str] | None = None
        self._ending = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="engine-ranks", daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while not self._ending.wait(_POLL_S):
            for rank, process in enumerate(self._processes, start=1):
                if (how := process.poll()) is not None:
                    self._lost = rank, how
                    self._on_loss(rank, how)
                    return

    def tell(self, on_loss: OnLoss) -> None:
        """Tell another from now on, and of what has been lost: at once, and maybe twice."""
        self._on_loss = on_loss
        if self._lost is not None:
            on_loss(*self._lost)

    def expect_end(self) -> None:
        """From now on, an end is no loss."""
        self._ending.set()
        self._watching.join()

    def end(self, patience_s: float) -> None:
        """Wait up to `patience_s` until all have ended, and kill what has not."""
        self.expect_end()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)
        for process in self._processes:
            process.kill()
