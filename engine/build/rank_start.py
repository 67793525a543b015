"""Owns what the starts of ranks share: how followers are started, and what one with a GPU is told.
Never loads anything."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.models.description import Shard
from engine.parallel.processes import RankLauncher, RankProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpecification:
    """What a follower with a GPU needs in order to load its part and to join."""

    shard: Shard
    place: str
    """host:port of the leader."""
    model_dir: Path
    config: EngineConfig

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


def any_port(host: str) -> str:
    """Return an address at which the leader's end of a group takes any free port, and holds it from then on."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"
