"""Owns the start of a rank that follows: it loads its part of the model as the leader says, and joins the group.
Never resolves a setting or claims memory: the leader has done both for all ranks."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from engine.build.cpu_model import cpu_builder, threads_of_rank
from engine.config import EngineConfig, ResolvedConfig
from engine.execution.device import TorchThreads
from engine.models.config import read_model_config
from engine.models.description import Shard
from engine.models.shards import sharded, vocab_sizes
from engine.parallel.follower import Follower
from engine.parallel.model_digest import model_digest
from kernels.choice import NATIVE, Choice
from kernels.collectives.group import RankLostError
from kernels.collectives.shared_memory import SharedMemoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """What a follower needs in order to load its part and to join."""

    shard: Shard
    directory: Path
    """Of the group; see SharedMemoryGroup."""
    model_dir: Path
    config: EngineConfig
    resolved: ResolvedConfig
    kernels: Choice

    def encode(self) -> bytes:
        return pickle.dumps(self)


def follow(specification: bytes) -> None:
    """Follow the leader until it ends. specification: Specification.encode, from the leader alone.

    Raises:
        RankLostError: another rank is lost.
        Exception: this rank has failed; the others know why, once they have met.
    """
    own: Specification = pickle.loads(specification)
    group = SharedMemoryGroup(own.directory, rank=own.shard.rank, size=own.shard.size)
    try:
        whole = read_model_config(own.model_dir)
        model = sharded(whole, own.shard)
        builder = cpu_builder(own.model_dir, model, own.config, own.resolved, own.kernels, group)
        digest = model_digest(own.model_dir)
        threads = 1 if own.kernels.name == NATIVE else threads_of_rank(own.resolved.num_threads, own.shard.size)
        TorchThreads(threads).use()
        follower = Follower(builder.build(), group, vocab_sizes(whole, own.shard.size), digest)
        group.join()
        follower.run()
    finally:
        group.close()


def main() -> None:
    """Follow as the specification on standard input says, in a process that ends with the one that started it."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    specification = sys.stdin.buffer.read(size)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        follow(specification)
    except RankLostError as error:
        sys.exit(f"This rank ends: {error}")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # which ends when nobody holds the other end any more
    os._exit(1)


if __name__ == "__main__":
    main()
