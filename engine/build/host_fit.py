"""Owns how much of the machine's memory an engine on the CPU takes, and how many KV blocks fit into the rest.
Never allocates: sizes come from tensors on torch's `meta` device, which has no memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from engine.build.facts import facts_of
from engine.build.kv_tiers import TierMemory, tier_memory
from engine.config import ConfigError, EngineConfig, max_drafting_tokens
from engine.features import DRAFTS, find_conflict
from engine.host.shares import SPARED, Claim, Room, shares
from engine.models.adapter_files import adapter_bytes
from engine.models.config import pixels_of
from engine.models.description import ModelConfig
from engine.models.kv_cache import blocks_in
from engine.models.narrow import Keep
from engine.models.native_adapters import packed_adapter_bytes
from engine.models.native_rewind import rewind_bytes
from engine.models.shards import head_rows
from engine.models.vision_weights import allocate_vision, vision_table
from engine.models.weights import embedding_in_blocks, weight_bytes

GIB = 2**30
KV_SHARE = 0.8
"""Share of the remaining memory that the KV cache takes if no setting says how much. It is never given back, and the
page cache, the HTTP side and other programs also need memory."""
MEMORY_GIB = 2.0
"""Memory for KV blocks if neither the config nor the system says how much there is to use."""

META = torch.device("meta")
_SUMS_OF_RANKS = 6
"""Sums for each rank and token of a step: of queries, keys and values, of gates and ups, and of single matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """Bytes that an engine takes besides its KV cache and recurrent states."""

    weights: int
    step: int
    """Estimate of the activations and logits of the largest step."""
    encoder_cache: int = 0
    encoding: int = 0
    """Estimate of what encoding the largest image takes. Images are encoded one at a time."""
    adapters: int = 0
    drafts: int = 0
    """What drafted tokens give to recurrent states, kept until it is known which are accepted."""
    host_tier: int = 0
    """KV in the host tier."""
    disk_buffers: int = 0
    """KV on its way to and from the disk tier."""

    @property
    def total(self) -> int:
        engine = self.weights + self.step + self.encoder_cache + self.encoding + self.adapters + self.drafts
        return engine + self.host_tier + self.disk_buffers

    def text(self) -> str:
        """Return every part in GiB, named by the setting that determines it."""
        parts = {
            "weights": self.weights,
            "a step of max_num_batched_tokens": self.step,
            "encoder_cache_memory_gib": self.encoder_cache,
            "encoding the largest image": self.encoding,
            "max_loras adapters": self.adapters,
            "num_speculative_tokens drafts": self.drafts,
            "kv_tiers.host_memory_gib": self.host_tier,
            "buffers for kv_tiers.disk_path": self.disk_buffers,
        }
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)


def together(uses: Iterable[HostUse]) -> HostUse:
    """Return what all ranks of an engine take."""
    found = list(uses)
    return HostUse(**{part.name: sum(getattr(use, part.name) for use in found) for part in fields(HostUse)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """The memory that an engine takes, and how much it may take."""

    use: HostUse
    room: Room | None
    """None if the system does not say how much is free."""

    def blocks(
        self,
        config: EngineConfig,
        block_bytes: int,
        state_bytes: int,
        most: int,
        here: tuple[int, int] | None = None,
    ) -> tuple[int, str]:
        """Return the number of KV blocks, and the reason. block_bytes, state_bytes: of the whole engine. most: more
        blocks would be of no use. here: the same two of the ranks on this machine; None: all are.

        Raises:
            ConfigError: there is no memory for what the config asks for, or for a single block in addition to the rest.
        """
        self.check_use()
        asked = _asked_bytes(config, block_bytes, state_bytes)
        if asked is None:
            return self._that_fit(*(here or (block_bytes, state_bytes)), most)
        name, size, num_blocks = asked
        if here is not None and here != (block_bytes, state_bytes):
            size = num_blocks * here[0] + here[1]
        self.check(f"{name} is {getattr(config, name)}, which takes {_gib(size)}", size)
        if config.num_kv_blocks is not None:
            return num_blocks, f"asked for; {_gib(num_blocks * block_bytes)}"
        less = f", less {state_bytes} bytes of recurrent state," if state_bytes else ""
        return num_blocks, f"{name} {config.kv_cache_memory_gib:g}{less} at {block_bytes} bytes a block"

    def check_use(self) -> None:
        """Raise ConfigError if there is no memory for what is used."""
        if self.room is not None and self.use.total > self.room.free:
            raise ConfigError(
                f"This engine needs {_gib(self.use.total)} without any KV cache ({self.use.text()}), but "
                f"{_free(self.room)}."
            )

    def check(self, what: str, size: int) -> None:
        """Raise ConfigError if there is no memory for `size` bytes besides what is used. what: who wants them, for the
        message."""
        if self.room is not None and self.use.total + size > self.room.free:
            left, after = max(0, self.room.free - self.use.total), f" after {self.use.text()}" * bool(self.use.total)
            raise ConfigError(f"{what}, but only {_gib(left)} is left{after}: {_free(self.room)}.")

    def _that_fit(self, block_bytes: int, state_bytes: int, most: int) -> tuple[int, str]:
        if self.room is None:
            unknown = f"{MEMORY_GIB:g} GiB: this system does not say what is free"
            return blocks_in(MEMORY_GIB, block_bytes, state_bytes), unknown
        least = block_bytes + state_bytes
        self.check(f"kv_cache_memory_gib is unset, and one KV block takes {least} bytes", least)
        mine = min(self.room.free, self.room.share) - self.use.total
        fit = (int(KV_SHARE * mine) - state_bytes) // block_bytes
        if fit < 1:
            raise ConfigError(
                f"kv_cache_memory_gib is unset, and no KV block of {block_bytes} bytes fits into this engine's share "
                f"({self.room.share / GIB:.2f} GiB: {self.room.engines} engines share the memory) beside "
                f"{self.use.text()}: {_free(self.room)}. Set kv_cache_memory_gib, or serve fewer engines here."
            )
        if most <= fit:
            return most, f"all that max_num_seqs requests of max_model_len tokens can hold; {_gib(most * block_bytes)}"
        share = f", shared by {self.room.engines} engines" if self.room.engines > 1 else ""
        return fit, f"{KV_SHARE:.0%} of what is left beside {self.use.text()}; {_free(self.room)}{share}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _free(room: Room) -> str:
    memory = room.memory
    promised = ""
    if room.promised:  # to engines that are starting, and for KV blocks that were never used
        promised = f", of which {_gib(room.promised)} are promised to engines that have not taken it yet"
    free = f"{_gib(memory.free)} of {_gib(memory.total)} are free ({memory.source})"
    return f"{free}{promised}, and {SPARED:.0%} is kept free"


def _asked_bytes(config: EngineConfig, block_bytes: int, state_bytes: int) -> tuple[str, int, int] | None:
    """(setting, bytes with recurrent states, blocks) if the config sets the size of the KV cache; else None."""
    if (blocks := config.num_kv_blocks) is not None:
        return "num_kv_blocks", blocks * block_bytes + state_bytes, blocks
    if (gib := config.kv_cache_memory_gib) is not None:
        return "kv_cache_memory_gib", int(gib * GIB), blocks_in(gib, block_bytes, state_bytes)
    return None


def host_use(model_dir: Path, model: ModelConfig, config: EngineConfig, dtype: torch.dtype, *, native: bool) -> HostUse:
    """Return the memory that an engine on the CPU takes, without a draft model. native: see weights_on_host.

    Raises:
        CheckpointError: the checkpoint's files cannot be read.
        ConfigError: a tier of KV is too small for this model.
    """
    cache = 0 if model.vision is None else int(config.encoder_cache_memory_gib * GIB)
    tiers = tier_memory(model, config, dtype)
    return HostUse(
        weights=weights_on_host(model_dir, model, config, dtype, native=native) + _vision_bytes(model, dtype),
        step=_step_bytes(model, config),
        encoder_cache=cache,
        encoding=_encoding_bytes(model_dir, model, cache, dtype),
        adapters=config.max_loras
        * (packed_adapter_bytes if native else adapter_bytes)(model, config.max_lora_rank, dtype),
        drafts=_draft_bytes(model, config, dtype) if native else 0,
        host_tier=tiers.host_bytes,
        disk_buffers=tiers.buffer_bytes,
    )


def claim_tiers(config: EngineConfig, tiers: TierMemory) -> Claim | None:
    """Claim the host's memory for the KV tiers of an engine on a GPU; None if it has none.

    Raises:
        ConfigError: there is not so much.
    """
    if not tiers.total:
        return None
    with shares() as shared:
        budget = HostBudget(use=HostUse(weights=0, step=0), room=shared.room(1))
        setting = f"kv_tiers.host_memory_gib is {config.kv_tiers.host_memory_gib:g}"
        budget.check(f"{setting}, which takes {_gib(tiers.total)} with buffers", tiers.total)
        return shared.claim(tiers.total)


def weights_on_host(
    model_dir: Path, model: ModelConfig, config: EngineConfig, dtype: torch.dtype, *, native: bool
) -> int:
    """Return the bytes of a model's weights. native: whether on the native kernels, which keep 8-bit matrices and pack
    a tied LM head into memory of its own.

    Raises:
        CheckpointError: the checkpoint's files cannot be read.
    """
    keep, drawn = kept_on_cpu(config, native=native), config.load_format == "dummy"
    size = weight_bytes(None if drawn else model_dir, model, dtype, keep=keep)
    return size + (_head_bytes(model, dtype, keep) if native and model.tie_word_embeddings else 0)


def kept_on_cpu(config: EngineConfig, *, native: bool) -> Keep:
    """Return which packed matrices a CPU's kernels use as they are stored."""
    if not native:
        return Keep.NOTHING
    return Keep.GROUPED if config.stored else Keep.BY_OUTPUT


def _draft_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    can_draft = find_conflict(facts_of(model), feature=DRAFTS) is None
    return rewind_bytes(model, max_drafting_tokens(config, can_draft), dtype)


def _head_bytes(model: ModelConfig, dtype: torch.dtype, keep: Keep) -> int:
    """Return the bytes of a tied LM head beside the embedding. In blocks, weight_bytes has counted them."""
    if keep is Keep.GROUPED and embedding_in_blocks(model):
        return 0
    return len(head_rows(model)) * model.hidden_size * dtype.itemsize


def _vision_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    if model.vision is None:
        return 0
    return sum(tensor.nbytes for tensor in vision_table(allocate_vision(model.vision, dtype, META)).values())


def _encoding_bytes(model_dir: Path, model: ModelConfig, cache: int, dtype: torch.dtype) -> int:
    """cache: bytes of the encoder cache, which must hold an image."""
    if model.vision is None:
        return 0
    from engine.models.vision import encoding_bytes  # not needed for text models

    trained = pixels_of(model_dir, model.vision).max_pixels // model.vision.side**2
    kept = cache // (model.vision.output_size * dtype.itemsize)
    return encoding_bytes(model.vision, min(trained, kept), dtype)


def _step_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Estimate a step's bytes in float32: per token, the rows that a layer makes; per seat, its logits and the
    sampler's copies."""
    row = 4 * model.hidden_size + 2 * model.intermediate_size + 2 * model.num_heads * model.head_dim
    row += _SUMS_OF_RANKS * config.max_lora_rank if config.max_loras else 0
    row += _expert_numbers(model, config.expert_parallel_size, rounded=config.rounds_activations)
    return 4 * (config.max_num_batched_tokens * row + 4 * config.max_num_seqs * model.vocab_size)


def _expert_numbers(model: ModelConfig, ranks: int, *, rounded: bool) -> int:
    """Return how many numbers a step's token takes in a mixture: its rows by expert, and on the way to other ranks and
    back. A rank has room for all that all ranks could send it; layers use the same memory. rounded: whether experts
    multiply rows of 8 bits, which take 48 bytes for 32 inputs."""
    mixtures = [layer.experts for layer in model.layers if layer.experts is not None]
    there, back = (1 + ranks * 2, 1 + ranks) if ranks > 1 else (1, 1)  # as sent, come and by expert; as they go back
    return max(
        (
            one.routing.per_token
            * (
                (there + back) * model.hidden_size
                + ranks * one.intermediate_size
                + rounded * ranks * (model.hidden_size + one.intermediate_size) * 3 // 8
            )
            for one in mixtures
        ),
        default=0,
    )
