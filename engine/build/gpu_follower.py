"""Owns the start of a rank that follows on a GPU: the same start as the leader's, on this rank's part and device.
Never plans or answers, and never outlives its leader."""

from __future__ import annotations

from engine.build.gpu import start_on_device
from engine.build.gpu_ranks import FollowingGpu, group_of
from engine.build.rank_start import GpuSpecification
from engine.config import ConfigError
from engine.execution.device import choose_device
from engine.models.config import read_model_config
from engine.models.shards import vocab_sizes
from kernels.collectives.group import RankLostError


def follow_on_gpu(own: GpuSpecification) -> None:
    """Follow the leader until it ends.

    Raises:
        ConfigError: this process sees no GPU, or what the config asks for does not fit into its memory.
        RankLostError: another rank is lost.
        Exception: this rank has failed; the others know why, once they have met.
    """
    device, reason = choose_device(own.config)
    if device.capability is None:
        raise ConfigError(f"rank {own.shard.rank} has no GPU: {reason}")
    group = group_of(own.place, own.shard, device)
    try:
        sizes = vocab_sizes(read_model_config(own.model_dir), own.shard.size)
        start_on_device(own.model_dir, own.config, device, reason, follows=FollowingGpu(group, sizes)).follow()
    except RankLostError:
        raise
    except BaseException as error:
        if group.has_joined:
            group.give_up(f"{type(error).__name__}: {error}")
        raise
    finally:
        group.close()
