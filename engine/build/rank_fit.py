"""Owns whether a rank that is not on the leader's machine has room there for its part of the model, and threads.
Never changes what the leader resolved: it refuses the start, and says which rank and machine lack what."""

from __future__ import annotations

import socket
from pathlib import Path

from engine.build.cpu_model import threads_of_rank
from engine.build.host_fit import HostBudget, host_use
from engine.build.resolve import all_state_bytes, block_bytes, torch_dtype
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.host.cores import refused_threads
from engine.host.shares import Claim, shares
from engine.models.description import ModelConfig, Shard
from engine.models.shards import sharded


def claim_rank(
    model_dir: Path, whole: ModelConfig, shard: Shard, config: EngineConfig, resolved: ResolvedConfig, *, native: bool
) -> Claim:
    """Claim the memory of this rank on its machine. whole: the model. native: whether the native kernels compute it.

    Raises:
        ConfigError: there is not so much, or there are fewer cores than the rank has threads.
    """
    threads = threads_of_rank(resolved.num_threads, shard.size)
    try:
        if (refusal := refused_threads(threads)) is not None:
            raise ConfigError(f"{refusal}; {resolved.num_threads} are for all {shard.size} ranks.")
        dtype, ranks = torch_dtype(resolved.dtype), (shard.rank,)
        use = host_use(model_dir, sharded(whole, shard), config, dtype, native=native)
        one, states = block_bytes(whole, config, dtype, None, ranks), all_state_bytes(whole, config, dtype, ranks)
        with shares() as shared:
            cache = resolved.num_kv_blocks * one + states
            budget = HostBudget(use=use, room=shared.room(1))
            budget.check_use()
            budget.check(
                f"its part of the KV cache of {resolved.num_kv_blocks} blocks takes {cache / 2**30:.2f} GiB", cache
            )
            return shared.claim(use.total + cache)
    except ConfigError as error:
        raise ConfigError(f"Rank {shard.rank}, on {socket.gethostname()}: {error}") from error
