"""Owns whether a rank that is not on the leader's machine has room there for its part of the model, and threads.
Never plans: it says how many KV blocks it has room for, or refuses the start by its number and its machine's name."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.build.cpu_model import threads_of_rank
from engine.build.host_fit import HostBudget, host_use
from engine.build.resolve import all_state_bytes, block_bytes, torch_dtype
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.host.cores import refused_threads
from engine.host.shares import Claim, shares
from engine.models.description import ModelConfig, Shard
from engine.models.shards import sharded

logger = logging.getLogger(__name__)


def claim_rank(
    model_dir: Path,
    whole: ModelConfig,
    shard: Shard,
    config: EngineConfig,
    resolved: ResolvedConfig,
    *,
    native: bool,
    engines: int,
) -> tuple[Claim, int]:
    """Claim the memory of this rank on its machine. Return how many KV blocks are within it: as many as the leader has
    resolved, or as fit, if they are fewer and no setting asks for a number. whole: the model. native: whether the
    native kernels compute it. engines: how many share the machine's memory, each of the ranks there counted as one.

    Raises:
        ConfigError: there is not so much, or there are fewer cores than the rank has threads.
    """
    threads = threads_of_rank(resolved.num_threads, shard.size)
    with naming(shard.rank):
        if (refusal := refused_threads(threads)) is not None:
            raise ConfigError(f"{refusal}; {resolved.num_threads} are for all {shard.size} ranks.")
        dtype, ranks = torch_dtype(resolved.dtype), (shard.rank,)
        use = host_use(model_dir, sharded(whole, shard), config, dtype, native=native)
        one, states = block_bytes(whole, config, dtype, None, ranks), all_state_bytes(whole, config, dtype, ranks)
        with shares() as shared:
            budget = HostBudget(use=use, room=shared.room(engines))
            num_blocks = _blocks(budget, config, resolved.num_kv_blocks, one, states)
            return shared.claim(use.total + num_blocks * one + states), num_blocks


def give_back_blocks(
    claim: Claim, count: int, whole: ModelConfig, shard: Shard, config: EngineConfig, resolved: ResolvedConfig
) -> None:
    """Claim the memory of `count` KV blocks less: another rank has no room for them, so that they are never used.
    claim: by claim_rank. whole, shard, config, resolved: as there."""
    one = block_bytes(whole, config, torch_dtype(resolved.dtype), None, (shard.rank,))
    claim.give_back(count * one)


def _blocks(budget: HostBudget, config: EngineConfig, planned: int, block_bytes: int, state_bytes: int) -> int:
    """Return how many of the blocks that the leader has resolved are on this rank."""
    if config.num_kv_blocks is None and config.kv_cache_memory_gib is None:
        fit, reason = budget.blocks(config, block_bytes, state_bytes, planned)
        if fit < planned:
            logger.info("this rank's machine has room for %d of the leader's %d KV blocks: %s", fit, planned, reason)
        return min(fit, planned)
    budget.check_use()
    size = planned * block_bytes + state_bytes
    budget.check(f"its part of the KV cache of {planned} blocks takes {size / 2**30:.2f} GiB", size)
    return planned


@contextmanager
def naming(rank: int) -> Iterator[None]:
    """Put the rank and its machine before what a refusal says."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"Rank {rank}, on {socket.gethostname()}: {error}") from error
