"""Owns the start of a rank that follows: it loads its part of the model as the leader says, and joins the group.
Never resolves a setting: the leader has, and has claimed memory for the ranks of its machine."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.build.cpu_model import cpu_builder, threads_of_rank
from engine.build.rank_fit import claim_rank, give_back_blocks
from engine.build.rank_start import GpuSpecification
from engine.config import EngineConfig, ResolvedConfig
from engine.execution.device import TorchThreads
from engine.host.shares import join_claim
from engine.models.config import read_model_config
from engine.models.description import Shard
from engine.models.shards import sharded, vocab_sizes
from engine.parallel.follower import Follower
from engine.parallel.model_digest import model_digest
from kernels.choice import NATIVE, Choice
from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import ExchangeGroup, RankLostError
from kernels.collectives.shared_memory import SharedMemoryGroup
from kernels.cpu.native.library import identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """What a follower needs in order to load its part and to join."""

    shard: Shard
    place: Path | str
    """Where the group meets: see `group_at`."""
    model_dir: Path
    config: EngineConfig
    resolved: ResolvedConfig
    kernels: Choice
    is_counted: bool
    """Whether this rank is on the leader's machine, where the leader has claimed its memory."""
    engines: int
    """How many share the memory of this rank's machine, each of the ranks there counted as one."""
    claim: Path | None
    """The leader's claim; None: nobody knows of it."""

    def encode(self) -> bytes:
        return pickle.dumps(self)

    def follow(self) -> None:
        """Follow the leader until it ends. Raises: as the function `follow`."""
        group = group_at(self.place, self.shard)
        native, claim, resolved = self.kernels.name == NATIVE, None, self.resolved
        try:
            whole = read_model_config(self.model_dir)
            if not self.is_counted:
                asked = self.model_dir, whole, self.shard, self.config, resolved
                claim, num_blocks = claim_rank(*asked, native=native, engines=self.engines)
                resolved = replace(resolved, num_kv_blocks=num_blocks)
            elif self.claim is not None:
                join_claim(self.claim)

            def plan_with(least: int) -> None:
                if claim is not None:
                    surplus = resolved.num_kv_blocks - least
                    give_back_blocks(claim, surplus, whole, self.shard, self.config, resolved)

            model = sharded(whole, self.shard)
            builder = cpu_builder(self.model_dir, model, self.config, resolved, self.kernels, group)
            here = what_computes(self.model_dir, self.kernels.name)
            TorchThreads(1 if native else threads_of_rank(resolved.num_threads, self.shard.size)).use()
            sizes = vocab_sizes(whole, self.shard.size)
            follower = Follower(builder.build(), group, sizes, here, resolved.num_kv_blocks, plan_with)
            group.join()
            follower.run()
        finally:
            group.close()
            if claim is not None:
                claim.release()


def group_at(place: Path | str, shard: Shard) -> ExchangeGroup:
    """Return a rank's end of the group. place: the directory of ranks on one machine, or host:port of the leader."""
    if isinstance(place, Path):
        return SharedMemoryGroup(place, rank=shard.rank, size=shard.size)
    return GlooGroup(place, rank=shard.rank, size=shard.size)


def what_computes(model_dir: Path, kernels: str) -> str:
    """Say what must be the same on all ranks: the model, and instructions that give the same bits. Each rank chooses a
    token's experts by itself, and all must choose the same. kernels: their name.

    Raises:
        OSError: a file of the model cannot be read.
    """
    torchs = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    by = identity() if kernels == NATIVE else torchs
    return f"the model {model_digest(model_dir)}, computed by {kernels} ({by})"


def follow(specification: bytes) -> None:
    """Be a rank until the leader ends. specification: what the leader's class for the rank has encoded; its `follow` is
    called.

    Raises:
        RankLostError: another rank is lost.
        Exception: this rank has failed; the others know why, once they have met.
    """
    own = pickle.loads(specification)
    if isinstance(own, GpuSpecification):
        from engine.build.gpu_follower import follow_on_gpu  # ranks without a GPU need none of it

        follow_on_gpu(own)
    else:
        own.follow()


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
