"""Owns how a model is built on a CPU's kernels: one engine's, a draft model, or a rank's part of a larger one.
Never chooses kernels or checks for memory: the start has done so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.build.host_fit import kept_on_cpu
from engine.build.model import ModelBuilder, Runner
from engine.config import EngineConfig, ResolvedConfig
from engine.models.adapted import AdaptedModel
from engine.models.computed import Model
from engine.models.description import ModelConfig
from engine.models.eager import EagerModel
from engine.models.native import NativeModel
from kernels.choice import NATIVE, Choice
from kernels.collectives.group import Exchanging, Group
from kernels.eager.ops import TABLES


def cpu_builder(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    resolved: ResolvedConfig,
    kernels: Choice,
    group: Group | None = None,
    expert_ranks: Exchanging | None = None,
) -> ModelBuilder[Model]:
    """Return the builder for a checkpoint on `kernels`. model: of a rank, its part. resolved: the engine's, whose main
    model may be another. group: the ranks that compute the model; None: it is whole. expert_ranks: those that have the
    experts between them; None: all are here."""
    if model.vision is not None:
        from engine.build.encoder import encoder_builder  # not needed for text models

        native = _recording(config, resolved, group) if kernels.name == NATIVE else None
        return encoder_builder(model_dir, model, config, resolved, native, group)
    return ModelBuilder(
        model_dir=model_dir,
        model=model,
        config=config,
        resolved=resolved,
        runner=_runner(config, resolved, kernels, group, expert_ranks),
        keep=kept_on_cpu(config, native=kernels.name == NATIVE),
    )


def _runner(
    config: EngineConfig,
    resolved: ResolvedConfig,
    kernels: Choice,
    group: Group | None,
    expert_ranks: Exchanging | None,
) -> Runner[Model]:
    ranks: dict[str, Any] = {"group": group, "expert_ranks": expert_ranks}
    if kernels.name == NATIVE:
        recording = _recording(config, resolved, group) | ranks
        return lambda decoder, cache, state: NativeModel(decoder, cache, state, **recording)
    ops, size = TABLES[kernels.name], resolved.block_size
    if config.max_loras:
        rank = config.max_lora_rank
        return lambda decoder, cache, _: AdaptedModel(decoder, ops, cache, size, max_rank=rank, **ranks)
    return lambda decoder, cache, state: EagerModel(decoder, ops, cache, size, state, **ranks)


def ranks_of(config: EngineConfig) -> int:
    """Return how many processes an engine has."""
    return config.tensor_parallel_size * config.expert_parallel_size


def threads_of_rank(num_threads: int, ranks: int) -> int:
    """Return how many of the engine's threads each of its ranks has, all of which are on one machine."""
    return max(1, num_threads // ranks)


def _recording(config: EngineConfig, resolved: ResolvedConfig, group: Group | None) -> dict[str, Any]:
    """Return how a NativeModel records its steps. A draft model, of no group, has as many threads as the leader."""
    ranks = 1 if group is None else group.size
    ranks *= config.expert_parallel_size
    return {
        "block_size": resolved.block_size,
        "num_threads": threads_of_rank(resolved.num_threads, ranks),
        "num_tokens": resolved.max_num_batched_tokens,
        "num_sampled": resolved.max_decode_tokens,
        "num_drafted": resolved.max_drafting_tokens if resolved.num_speculative_tokens else 0,
        "quantize": config.quantize == "int8",
        "rounded": config.rounds_activations,
        "max_lora_rank": config.max_lora_rank if config.max_loras else 0,
        "group": group,
    }
