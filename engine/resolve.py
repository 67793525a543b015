"""Owns the step from what was asked to what is served: limits, types, threads and blocks, each with its reason.
Never allocates or loads anything: it reads a few small files and the machine's description."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.kv_cache import blocks_in, bytes_per_block
from engine.models.config import CheckpointError, ModelConfig, read_json
from kernels.choice import Choice

_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # the last is Arm's


def resolve(model_dir: Path, model: ModelConfig, config: EngineConfig, kernels: Choice) -> ResolvedConfig:
    """What this machine and this checkpoint make of `config`.

    Raises:
        ConfigError: a setting asks for more than the checkpoint or the memory can give.
        CheckpointError: the checkpoint's eos_token_id is not a token id.
    """
    max_model_len, length_reason = _max_model_len(model, config)
    dtype, dtype_reason = _dtype(config)
    num_blocks, blocks_reason = _num_blocks(model, config, dtype)
    num_threads, threads_reason = _num_threads(config)
    return ResolvedConfig.of(
        config,
        drafts=True,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        vocab_size=model.vocab_size,
        eos_token_ids=_eos_token_ids(model_dir),
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels.name,
        num_threads=num_threads,
        reasons={
            "max_model_len": length_reason,
            "dtype": dtype_reason,
            "num_kv_blocks": blocks_reason,
            "num_threads": threads_reason,
            "kernels": kernels.reason,
        },
    )


def torch_dtype(name: str) -> torch.dtype:
    """The type that ResolvedConfig.dtype names."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _max_model_len(model: ModelConfig, config: EngineConfig) -> tuple[int, str]:
    longest = model.rope.longest_position(model.max_position_embeddings)
    if config.max_model_len is None:
        # Dynamic scaling costs quality at short lengths too, so it is used only where a longer context is asked for.
        served = model.max_position_embeddings if model.rope.rope_type == "dynamic" else longest
        return served, f"what the checkpoint was trained for (RoPE {model.rope.rope_type})"
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the checkpoint serves at most {longest} positions "
            f"(max_position_embeddings {model.max_position_embeddings}, RoPE {model.rope.rope_type} "
            f"with factor {model.rope.factor:g})."
        )
    return config.max_model_len, f"asked for; the checkpoint serves up to {longest}"


def _dtype(config: EngineConfig) -> tuple[torch.dtype, str]:
    if config.dtype != "auto":
        return torch_dtype(config.dtype), "asked for"
    flags = cpu_flags()
    for flag in _BF16_FLAGS:
        if flag in flags:
            return torch.bfloat16, f"the CPU multiplies bfloat16 natively ({flag})"
    return torch.float32, f"the CPU has none of {', '.join(_BF16_FLAGS)}, so bfloat16 would be emulated"


def cpu_flags() -> frozenset[str]:
    """Instruction set extensions as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _num_blocks(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> tuple[int, str]:
    block_bytes = bytes_per_block(model, config.block_size, dtype)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, f"asked for; {config.num_kv_blocks * block_bytes / 2**30:.2f} GiB"
    blocks = blocks_in(config.kv_cache_memory_gib, block_bytes)
    return blocks, f"kv_cache_memory_gib {config.kv_cache_memory_gib:g} at {block_bytes} bytes a block"


def _num_threads(config: EngineConfig) -> tuple[int, str]:
    if config.num_threads is not None:
        return config.num_threads, "num_threads in the config, or this replica's share of the machine's cores"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    if quota is not None and quota < cores:
        # More threads than the container's quota would be stopped in the middle of every parallel region.
        return max(1, int(quota)), f"the container's CPU quota is {quota:g} of {cores} cores"
    return cores, f"this process may use {cores} cores"


def _cpu_quota() -> float | None:
    """Cores that the container may use, by cgroup v2; None if it has no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """generation_config.json knows the chat model's own end tokens; config.json often only the base model's."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise CheckpointError(f"{path}: eos_token_id is {value!r}: expected a token id or a list of them.")
            return tuple(ids)
    return ()
