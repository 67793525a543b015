"""Owns the start of KV tiers: how much memory they take, what their files depend on, and the directory.
Never moves a block, and touches no directory before the engine is built."""

from __future__ import annotations

import logging
import stat
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.execution.kv_blocks import CpuBlockCopier, NarrowBlockCopier, form_of
from engine.models.config import CheckpointError
from engine.models.description import ModelConfig
from engine.models.kv_cache import KVCache, bytes_per_block, cache_dtype
from engine.tiers.copier import BlockCopier, BlockFiles
from engine.tiers.mover import spare_rows
from kernels.choice import NATIVE
from kernels.cpu.narrow_blocks import TorchBlocks
from kernels.cpu.native.blocks import NativeBlocks
from kernels.cpu.native.library import identity

GIB = 2**30
CPU = "cpu"
"""ResolvedConfig.device without a GPU."""
FEWEST_ON_DISK = 64
"""A disk tier that holds fewer blocks than one long prompt has is a mistake."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """The machine's memory that tiers take."""

    block_bytes: int
    """What a block takes in a tier, where it may be narrower than in the KV cache."""
    host_blocks: int = 0
    """Blocks of the host tier."""
    buffers: int = 0
    """Further rows, for blocks on their way to and from the disk."""

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.block_bytes

    @property
    def buffer_bytes(self) -> int:
        return self.buffers * self.block_bytes

    @property
    def total(self) -> int:
        return self.host_bytes + self.buffer_bytes


def tier_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of K and V in lower tiers. dtype: the engine's."""
    narrow = config.kv_tiers.dtype
    return cache_dtype(config.kv_cache_dtype if narrow == "auto" else narrow, dtype)


def tier_block_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a block in a tier, scales included. dtype: the engine's."""
    return bytes_per_block(model, config.block_size, tier_dtype(config, dtype))


def tier_memory(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> TierMemory:
    """Return the memory of the tiers that the config asks for; nothing if it asks for none. dtype: the engine's.

    Raises:
        ConfigError: a tier is too small for this model.
    """
    tiers = config.kv_tiers
    size = tier_block_bytes(model, config, dtype)
    host, disk = int(tiers.host_memory_gib * GIB), int(tiers.disk_gib * GIB)
    if tiers.host_memory_gib > 0 and host < size:
        raise ConfigError(
            f"kv_tiers.host_memory_gib is {tiers.host_memory_gib:g} ({host} bytes), but one block of this model takes "
            f"{size} bytes."
        )
    if tiers.disk_path is not None and disk < FEWEST_ON_DISK * size:
        raise ConfigError(
            f"kv_tiers.disk_gib is {tiers.disk_gib:g} ({disk} bytes), but {FEWEST_ON_DISK} blocks of this model, the "
            f"fewest that make sense on a disk, take {FEWEST_ON_DISK * size} bytes."
        )
    return TierMemory(size, host // size, spare_rows(size, disk=tiers.disk_path is not None))


def tier_reasons(config: EngineConfig, memory: TierMemory) -> dict[str, str]:
    """Say what the tiers hold, for ResolvedConfig.reasons; nothing if there are none. memory: see tier_memory."""
    tiers, parts = config.kv_tiers, list[str]()
    if memory.host_blocks:
        parts.append(f"{memory.host_blocks} blocks in {memory.host_bytes / GIB:.2f} GiB of the machine's memory")
    if tiers.disk_path is not None:
        blocks = int(tiers.disk_gib * GIB) // memory.block_bytes
        encrypted = "" if tiers.disk_key_file is None else ", encrypted"
        parts.append(f"about {blocks} blocks in {tiers.disk_gib:g} GiB of {tiers.disk_path}{encrypted}")
    narrow = "" if tiers.dtype == "auto" else f", in {tiers.dtype}"
    return {"kv_tiers": f"asked for; {' and '.join(parts)}{narrow}"} if parts else {}


def cpu_copier(cache: KVCache, config: EngineConfig, *, native: bool) -> BlockCopier:
    """Return what copies a CPU's blocks to lower tiers and back. native: the cache is in the native kernels' order."""
    if config.kv_tiers.dtype == "auto":
        return CpuBlockCopier(cache)
    form = form_of(cache, cache_dtype(config.kv_tiers.dtype, torch.float32))
    return NarrowBlockCopier(cache, NativeBlocks(form) if native else TorchBlocks(form))


def check_key(config: EngineConfig) -> bytes | None:
    """Return the key that files are encrypted with; None if they are not.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    path = config.kv_tiers.disk_key_file
    if path is None:
        return None
    from engine.tiers.cipher import read_key  # not needed without a key

    return read_key(Path(path))


def open_files(
    model_dir: Path, model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig, memory: TierMemory
) -> BlockFiles | None:
    """Return the disk tier, whose directory is made if necessary; None if the config asks for none. config: `quantize`
    is resolved. memory: see tier_memory.

    Raises:
        CheckpointError: a file of the model cannot be read.
        ConfigError: the directory or the key cannot be used.
    """
    tiers = config.kv_tiers
    if tiers.disk_path is None:
        return None
    from engine.tiers.disk import DiskTier  # not needed without a disk tier
    from engine.tiers.fingerprint import fingerprint

    try:
        found = fingerprint(model_dir, kv_facts(model, config, resolved))
    except OSError as error:
        raise CheckpointError(f"{model_dir}: a file cannot be read: {error}.") from error
    key = check_key(config)
    if tiers.disk_key_file is not None:
        _warn_of_readable(Path(tiers.disk_key_file))
    return DiskTier(
        Path(tiers.disk_path),
        capacity_bytes=int(tiers.disk_gib * GIB),
        block_bytes=memory.block_bytes,
        fingerprint=found,
        key=key,
    )


def _warn_of_readable(key_file: Path) -> None:
    """Warn of a key that everybody may read. That a group may is how orchestrators hand over secrets."""
    mode = stat.S_IMODE(key_file.stat().st_mode)
    if mode & stat.S_IROTH:
        logger.warning("kv_tiers.disk_key_file %s has mode %04o: every user may read the key.", key_file, mode)


def kv_facts(model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig) -> dict[str, str]:
    """Return what a bit of KV depends on besides the model's files, by name. config: `quantize` is resolved."""
    facts = {
        "dtype": resolved.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_tiers.dtype": config.kv_tiers.dtype,
        "quantize": config.quantize,
        "activations": config.activations,
        "load_format": config.load_format,
        "block_size": str(config.block_size),
        "release": _release(),
        "device": resolved.device,
        "kernels": resolved.kernels,  # which also decides how a block is laid out
        "code": identity() if resolved.kernels == NATIVE else f"torch {torch.__version__}",
    }
    if resolved.kernels != NATIVE and resolved.device == CPU:
        facts["processor"] = torch.backends.cpu.get_cpu_capability()
    if model.rope.rope_type in ("dynamic", "longrope"):
        facts["max_model_len"] = str(resolved.max_model_len)  # which decides the frequencies
    return facts


def _release() -> str:
    """Return the version of this package: another release may compute the same model in another way."""
    try:
        return version("chunkserve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
