"""Owns the start of an engine's other ranks, and how the leader's part becomes the whole model.
Never loads weights: each rank loads its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from engine.build.follower import Specification, group_at, what_computes
from engine.build.rank_start import any_port, start_followers
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.host.shares import Claim
from engine.models.computed import Model
from engine.models.description import ModelConfig, Shard
from engine.models.shards import vocab_sizes
from engine.parallel.follower import blocks_of_all
from engine.parallel.leader import LeadingModel
from engine.parallel.processes import RankLauncher
from engine.parallel.ranks import Ranks
from kernels.choice import Choice
from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import LEADER, ExchangeGroup, RankLostError
from kernels.collectives.shared_memory import new_directory
from kernels.cpu.native.library import NoLibraryError, load_library


class LeadingRank:
    """The leader's rank while an engine starts: it has started the others, which load their parts at the same time."""

    def __init__(
        self,
        group: ExchangeGroup,
        ranks: Ranks,
        model_dir: Path,
        vocab_sizes: list[int],
        block_size: int,
        kernels: Choice,
    ) -> None:
        self.group = group
        self.ranks = ranks
        self.shard = Shard(LEADER, group.size)
        self._model_dir = model_dir
        self._vocab_sizes = vocab_sizes
        self._block_size = block_size
        self._kernels = kernels

    def lead(self, own: Model, num_blocks: int) -> tuple[LeadingModel, list[int]]:
        """Return the model that all ranks are together, once every rank has loaded its part, and how many KV blocks
        each has room for. own, num_blocks: this rank's.

        Raises:
            ConfigError: a rank could not.
        """
        with _starting(self.group.size):
            self.ranks.meet(what_computes(self._model_dir, self._kernels.name))
            room = blocks_of_all(self.group, num_blocks)
        return LeadingModel(own, self.group, self._vocab_sizes, self._block_size), room


def start_ranks(
    launcher: RankLauncher,
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    resolved: ResolvedConfig,
    kernels: Choice,
    claim: Claim,
    engines: int,
) -> LeadingRank:
    """Start the followers, which end with `LeadingRank.ranks`. model: the whole one. claim: on the memory of all ranks
    of this machine. engines: how many have ranks on a machine.

    Raises:
        ConfigError: there is no place where they could meet.
    """
    size, place = config.tensor_parallel_size, place_of(launcher)
    here = launcher.ranks_beside(LEADER, size)
    with ExitStack() as undone:
        if isinstance(place, Path):
            undone.callback(shutil.rmtree, place, ignore_errors=True)
        with _starting(size):
            group = group_at(place, Shard(LEADER, size))
        undone.callback(group.close)
        if isinstance(group, GlooGroup):
            place = group.address  # with the port that it holds

        def specify(shard: Shard) -> bytes:
            own: dict[str, Any] = {"shard": shard, "place": place, "model_dir": model_dir, "kernels": kernels}
            own |= {"is_counted": shard.rank in here, "claim": claim.path}
            own |= {"engines": engines * len(launcher.ranks_beside(shard.rank, size))}
            return Specification(**own, config=config, resolved=resolved).encode()

        processes = start_followers(launcher, size, specify, undone)
        undone.pop_all()
    return LeadingRank(
        group, Ranks(group, processes), model_dir, vocab_sizes(model, size), resolved.block_size, kernels
    )


@contextmanager
def _starting(size: int) -> Iterator[None]:
    try:
        yield
    except (RankLostError, OSError) as error:  # such as no room in /dev/shm, or a host without an address
        raise ConfigError(f"tensor_parallel_size is {size}, and not every rank could start: {error}") from error


def place_of(launcher: RankLauncher) -> Path | str:
    """Return where the ranks meet: in memory if they are on one machine that has the native library, else at a port
    that the leader's end of the group chooses."""
    if launcher.remote_host is not None or not _has_library():
        return any_port(launcher.remote_host or "127.0.0.1")
    return new_directory()


def _has_library() -> bool:
    try:
        load_library()
    except NoLibraryError:
        return False
    return True
