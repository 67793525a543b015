"""Owns what the starts of ranks share, on CPUs and GPUs: what a follower is told, its start, and where ranks meet.
Never loads anything."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig, ResolvedConfig
from engine.models.description import Shard
from engine.parallel.processes import RankLauncher, RankProcess
from kernels.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """What a follower needs in order to load its part and to join."""

    shard: Shard
    place: Path | str
    """Where the group meets: the directory of ranks on one machine, or host:port of the leader."""
    model_dir: Path
    config: EngineConfig
    resolved: ResolvedConfig
    kernels: Choice
    on_gpu: bool = False

    def encode(self) -> bytes:
        return pickle.dumps(self)


def start_followers(
    launcher: RankLauncher, size: int, specify: Callable[[Shard], bytes], undone: ExitStack
) -> list[RankProcess]:
    """Start ranks 1 and up. specify: what each is told. undone: ends those that have started, if one does not."""
    processes: list[RankProcess] = []
    for rank in range(1, size):
        processes.append(launcher.start(rank, specify(Shard(rank, size))))
        undone.callback(processes[-1].kill)
    return processes


def free_port() -> int:
    """Return a port on which nobody listens, for a leader to listen on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
