"""Owns the start of a rank that follows: it loads its part of the model as the leader says, and joins the group.
Never resolves a setting or claims memory: the leader has done both for all ranks."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
import threading
from pathlib import Path

import torch

from engine.build.cpu_model import cpu_builder, threads_of_rank
from engine.build.rank_start import Specification
from engine.execution.device import TorchThreads
from engine.models.config import read_model_config
from engine.models.description import Shard
from engine.models.shards import sharded, vocab_sizes
from engine.parallel.follower import Follower
from engine.parallel.model_digest import model_digest
from kernels.choice import NATIVE, Choice
from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import Group, RankLostError
from kernels.collectives.shared_memory import SharedMemoryGroup
from kernels.cpu.native.library import identity


def group_at(place: Path | str, shard: Shard) -> Group:
    """Return a rank's end of the group. place: the directory of ranks on one machine, or host:port of the leader."""
    if isinstance(place, Path):
        return SharedMemoryGroup(place, rank=shard.rank, size=shard.size)
    return GlooGroup(place, rank=shard.rank, size=shard.size)


def what_computes(model_dir: Path, kernels: Choice) -> str:
    """Say what must be the same on all ranks: the model, and instructions that give the same bits. Each rank chooses a
    token's experts by itself, and all must choose the same.

    Raises:
        OSError: a file of the model cannot be read.
    """
    torchs = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    by = identity() if kernels.name == NATIVE else torchs
    return f"the model {model_digest(model_dir)}, computed by {kernels.name} ({by})"


def follow(specification: bytes) -> None:
    """Follow the leader until it ends. specification: Specification.encode, from the leader alone.

    Raises:
        RankLostError: another rank is lost.
        Exception: this rank has failed; the others know why, once they have met.
    """
    own: Specification = pickle.loads(specification)
    if own.on_gpu:
        from engine.build.gpu_follower import follow_on_gpu  # ranks without a GPU need none of it

        follow_on_gpu(own)
        return
    group = group_at(own.place, own.shard)
    try:
        whole = read_model_config(own.model_dir)
        model = sharded(whole, own.shard)
        builder = cpu_builder(own.model_dir, model, own.config, own.resolved, own.kernels, group)
        here = what_computes(own.model_dir, own.kernels)
        threads = 1 if own.kernels.name == NATIVE else threads_of_rank(own.resolved.num_threads, own.shard.size)
        TorchThreads(threads).use()
        follower = Follower(builder.build(), group, vocab_sizes(whole, own.shard.size), here)
        group.join()
        follower.run()
    finally:
        group.close()


def main() -> None:
    """Follow as the specification on standard input says, in a process that ends with the one that started it."""
    argparse.ArgumentParser(
        prog="python -m engine.build.follower",
        description="Be a rank of an engine. The leader starts this, and writes on its standard input what to load.",
    ).parse_args()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        size = int.from_bytes(_exactly(pipe, 8), "big")
        specification = _exactly(pipe, size)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        follow(specification)
    except RankLostError as error:
        sys.exit(f"This rank ends: {error}")


def _exactly(pipe: io.RawIOBase, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (piece := pipe.read(size - len(found))):
            sys.exit("The process that starts this rank has ended.")
        found += piece
    return found


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # nothing comes; it ends when nobody holds the other end any more
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
