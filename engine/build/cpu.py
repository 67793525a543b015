"""Owns the start of an engine on the CPU: first every check that can refuse, then the model and its executor.
Never schedules, and never takes memory of the machine before claiming it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine import features
from engine.batch.grammar import read_grammars
from engine.build.cpu_model import cpu_builder, ranks_of, threads_of_rank
from engine.build.draft import DraftCheckpoint, bytes_read, check_length, pass_cost, read_draft
from engine.build.facts import facts_of
from engine.build.host_fit import HostBudget, host_use, together, weights_on_host
from engine.build.kv_tiers import TierMemory, check_key, cpu_copier, open_files, tier_memory, tier_reasons
from engine.build.least_room import with_least
from engine.build.resolve import all_state_bytes, block_bytes, parts_on, resolve, resolve_dtype, torch_dtype
from engine.build.stored_weights import settle_quantize
from engine.config import ConfigError, EngineConfig, ResolvedConfig, refuse_conflicts
from engine.execution.device import Device
from engine.execution.draft_model import DraftModel
from engine.execution.executor import ModelExecutor, TorchExecutor
from engine.execution.lockstep import LockstepExecutor
from engine.features import CPU, NO_BYTE_WEIGHTS, NO_BYTES, Facts, find_conflict, turned_on
from engine.host.allocator import give_back_freed_memory, keep_freed_memory
from engine.host.shares import Claim, shares
from engine.models.computed import Model
from engine.models.config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.expert_ranks import DividedModel
from engine.models.matrix_counts import count_matrices
from engine.models.shards import parts_of, sharded, with_experts_of
from engine.models.stored_forms import in_integers
from engine.parallel.processes import RankLauncher, SubprocessLauncher
from engine.tiers.copier import BlockFiles
from engine.tiers.mover import TierMover
from kernels.choice import KERNELS, NATIVE, Choice, choose_kernels
from kernels.collectives.group import LEADER, ExchangeGroup
from kernels.cpu.processor import cpu_flags

if TYPE_CHECKING:
    from engine.build.ranks import LeadingRank

BYTE_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})
"""Instructions that multiply bytes; any of these will do."""


@dataclass(frozen=True, slots=True)
class DraftStart:
    """A draft model that is ready to be loaded."""

    checkpoint: DraftCheckpoint
    config: EngineConfig
    """The engine's, as far as it is for a draft model, with this model's own `quantize`."""
    kernels: Choice
    reasons: dict[str, str]
    """Those of the resolved config that are about this model."""


@dataclass(frozen=True, slots=True)
class CpuStart:
    """An engine that is ready to start: everything is checked and chosen and its memory is claimed, but no weight has
    been read."""

    model_dir: Path
    model: ModelConfig
    config: EngineConfig
    resolved: ResolvedConfig
    kernels: Choice
    draft: DraftStart | None
    tiers: TierMemory
    launcher: RankLauncher
    claim: Claim
    engines: int
    """How many share a machine's memory."""
    expert_ranks: ExchangeGroup | None = None
    """The ranks that have the experts between them, of which `model` has some. None: it has all."""

    def build(self) -> tuple[ModelExecutor, ResolvedConfig]:
        """Load the weights. The executor owns the claim from now on.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            ConfigError: the directory for KV cannot be used.
        """
        if self.model.vision is None:  # an encoder's buffers are large and seldom needed
            keep_freed_memory()
        with ExitStack() as undone:
            files = open_files(self.model_dir, self.model, self.config, self.resolved, self.tiers)
            if files is not None:
                undone.callback(files.close)
            executor, resolved = self._built(files)
            undone.pop_all()
        give_back_freed_memory()
        if self.expert_ranks is None:
            return executor, resolved
        return LockstepExecutor(executor, cast(DividedModel, executor.model), self.expert_ranks), resolved

    def _built(self, files: BlockFiles | None) -> tuple[TorchExecutor, ResolvedConfig]:
        """Load the weights. The executor owns files, too, and ends the other ranks."""
        with ExitStack() as undone:
            assert (self.expert_ranks is None) == (self.config.expert_parallel_size == 1), "see engine.build.lockstep"
            leading, shape, group = self._start_ranks(), self.model, None
            if leading is not None:
                undone.callback(leading.ranks.end)
                shape, group = sharded(self.model, leading.shard), leading.group
            how = self.config, self.resolved, self.kernels, group, self.expert_ranks
            builder = cpu_builder(self.model_dir, shape, *how)
            decoder = builder.load()
            resolved = self._with_counts(decoder)
            model = whole = builder.attach(decoder, resolved.num_kv_blocks)
            draft_model = self._draft_model()
            if leading is not None:
                whole, room = leading.lead(model, resolved.num_kv_blocks)
                resolved = self._with_least(resolved, room)
            executor = TorchExecutor(
                whole,
                num_threads=self._torch_threads,
                grammars=read_grammars(self.model_dir, self.resolved),
                draft_model=draft_model,
                kv_mover=self._mover(model, files),
                ranks=None if leading is None else leading.ranks,
                claim=self.claim,
            )
            undone.pop_all()
        return executor, resolved

    def _start_ranks(self) -> LeadingRank | None:
        """Start the other ranks; None: there are none."""
        if self.config.tensor_parallel_size == 1:
            return None
        from engine.build.ranks import start_ranks  # few engines have several

        return start_ranks(
            self.launcher,
            self.model_dir,
            self.model,
            self.config,
            self.resolved,
            self.kernels,
            self.claim,
            self.engines,
        )

    def _with_least(self, resolved: ResolvedConfig, room: Sequence[int]) -> ResolvedConfig:
        """Plan with no more KV blocks than any rank has room for, and claim no more here. A cache that is larger takes
        no memory for blocks that are never used. room: of each rank.

        Raises:
            ConfigError: so few blocks leave no room for an image.
        """
        if len(self._here) == len(room):
            return resolved
        self.give_back_blocks(resolved.num_kv_blocks - min(room))
        if min(room) == resolved.num_kv_blocks:
            why = f"ranks on other machines have room for as many; {resolved.reasons['num_kv_blocks']}"
            resolved = replace(resolved, reasons=resolved.reasons | {"num_kv_blocks": why})
        resolved = with_least(resolved, room)
        return _with_inputs(self.model_dir, self.model, self.config, resolved)

    def give_back_blocks(self, count: int) -> None:
        """Claim the memory of `count` KV blocks less on this machine."""
        draft = None if self.draft is None else self.draft.checkpoint.model
        one = block_bytes(self.model, self.config, torch_dtype(self.resolved.dtype), draft, self._here)
        self.claim.give_back(count * one)

    @property
    def _here(self) -> Sequence[int]:
        """The ranks on this machine that compute the model together."""
        return self.launcher.ranks_beside(LEADER, self.config.tensor_parallel_size)

    def _draft_model(self) -> DraftModel | None:
        """Load the draft model, which the leader has whole."""
        if self.draft is None:
            return None
        checkpoint = self.draft.checkpoint
        shape, config, kernels = checkpoint.model, self.draft.config, self.draft.kernels
        return DraftModel(cpu_builder(checkpoint.directory, shape, config, self.resolved, kernels).build())

    @property
    def _torch_threads(self) -> int:
        """torch does little next to the native kernels: a second thread of its own would take a core that they need."""
        if self.kernels.name == NATIVE and (self.draft is None or self.draft.kernels.name == NATIVE):
            return 1
        return threads_of_rank(self.resolved.num_threads, ranks_of(self.config))

    def _mover(self, model: Model, files: BlockFiles | None) -> TierMover | None:
        if not self.config.kv_tiers.any:
            return None
        copier = cpu_copier(model.cache, self.config, native=self.kernels.name == NATIVE)
        return TierMover(copier, host_blocks=self.tiers.host_blocks, files=files)

    def release(self) -> None:
        """Give up the claim, if the engine is not going to be built."""
        self.claim.release()

    def _with_counts(self, decoder: Decoder) -> ResolvedConfig:
        """Add to the reason for packed weights how many matrices come out how: some may not fit their format's form.
        The decoder is counted before the native kernels pack it, and may then round it."""
        if (reason := self.resolved.reasons.get("weights")) is None:
            return self.resolved
        rounds = self.kernels.name == NATIVE and self.config.quantize == "int8"
        counted = f"{reason}; {count_matrices(decoder.weights, rounds=rounds)}"
        return replace(self.resolved, reasons=self.resolved.reasons | {"weights": counted})


def start_on_cpu(
    model_dir: Path,
    config: EngineConfig,
    device: tuple[Device, str],
    engines: int,
    launcher: RankLauncher | None = None,
    expert_ranks: ExchangeGroup | None = None,
    num_here: int | None = None,
) -> CpuStart:
    """Check and choose everything. device: with the reason for it. engines: how many share this machine's memory.
    launcher: starts the engine's other ranks, if it has several; None: as children of this process. expert_ranks: those
    that have the experts between them; None: there are none, or all is only checked, as of the first rank. num_here:
    how many of the engine's ranks are on this machine; None: as the launcher says of the first.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ModelError: the draft model cannot be found or read.
        ConfigError: the config asks for more than the checkpoint, the device or the memory can give.
    """
    on = {**turned_on(config), CPU: f"this engine runs on the CPU ({device[1]})", **_missing()}
    refuse_conflicts(on)
    check_key(config)
    model = read_model_config(model_dir)
    refuse_conflicts({**on, **facts_of(model), **_without_byte_weights(model, config)})
    parts_of(model, config.tensor_parallel_size)  # which refuses what cannot be cut
    if (size := config.expert_parallel_size) > 1:
        model = with_experts_of(model, 0 if expert_ranks is None else expert_ranks.rank, size)
    kernels = _kernels(model, config)
    draft = _draft(read_draft(model_dir, model, config), _alone(config))
    launcher = launcher or SubprocessLauncher()
    here = launcher.ranks_beside(LEADER, config.tensor_parallel_size)
    num_here = num_here or len(launcher.ranks_beside(LEADER, ranks_of(config)))
    tiers = tier_memory(model, config, resolve_dtype(config, device[0])[0])
    config, why_bits = settle_quantize(model_dir, model, config, kernels)
    resolved, claim = _claimed(model_dir, model, config, kernels, device, draft, engines, here, num_here)
    reasons = why_bits | (draft.reasons if draft is not None else {}) | tier_reasons(config, tiers)
    reasons |= _rank_reasons(config, resolved)
    resolved = replace(resolved, reasons=resolved.reasons | reasons)
    try:
        resolved = _with_inputs(model_dir, model, config, resolved)
        if draft is not None:
            check_length(draft.checkpoint, resolved.max_model_len)
    except ValueError:
        claim.release()
        raise
    started = launcher, claim, engines, expert_ranks
    return CpuStart(model_dir, model, config, resolved, kernels, draft, tiers, *started)


def _with_inputs(model_dir: Path, model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig) -> ResolvedConfig:
    """Add the limits on images, if the model takes any. Raises: as engine.build.encoder.with_inputs."""
    if model.vision is None:
        return resolved
    from engine.build.encoder import with_inputs  # not needed for text models

    return with_inputs(model_dir, model, config, resolved)


def _missing() -> Facts:
    """Return what this processor lacks that a setting may need."""
    if cpu_flags() & BYTE_FLAGS:
        return {}
    return {NO_BYTES: f"this processor has none of {', '.join(sorted(BYTE_FLAGS))}"}


def _without_byte_weights(model: ModelConfig, config: EngineConfig) -> Facts:
    """Return why `quantize` leaves no matrix in integers of few bits, if it leaves none."""
    packed = model.quantization
    kept = packed is not None and any(one.by_output or in_integers(one) for _, one in packed.groups)
    if config.quantize not in ("auto", "stored") or kept:
        return {}
    return {NO_BYTE_WEIGHTS: f"the weights are {'not packed' if packed is None else packed.summary}"}


def _alone(config: EngineConfig) -> EngineConfig:
    """Return the draft model's config. Adapters are only for the main model, and drafts change no bit of an answer."""
    return replace(config, max_loras=0, batch_invariant=False)


def _claimed(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    kernels: Choice,
    device: tuple[Device, str],
    draft: DraftStart | None,
    engines: int,
    ranks: Sequence[int],
    num_here: int,
) -> tuple[ResolvedConfig, Claim]:
    """Return the resolved config and a claim on its memory, so that no other engine of this machine counts that as
    free. ranks, num_here: as engine.build.resolve.resolve; others check and claim their own (engine.build.rank_fit)."""
    dtype, _ = resolve_dtype(config, device[0])
    drafts, draft_cost = None if draft is None else draft.checkpoint.model, None
    native = kernels.name == NATIVE
    parts = parts_on(model, config, ranks)
    use = together(host_use(model_dir, part, config, dtype, native=native) for part in parts)
    if draft is not None:
        beside = draft.checkpoint.directory, draft.checkpoint.model, draft.config, dtype
        draft_native = draft.kernels.name == NATIVE
        use = replace(use, weights=use.weights + weights_on_host(*beside, native=draft_native))
        own = bytes_read(model_dir, model.whole or model, config, dtype, native=native)  # the same for all ranks
        draft_cost = draft.checkpoint.model, pass_cost(bytes_read(*beside, native=draft_native), own)
    with shares() as shared:
        budget = HostBudget(use=use, room=shared.room(engines))
        resolved = resolve(
            model_dir, model, config, kernels, device, budget, draft=draft_cost, ranks=ranks, num_here=num_here
        )
        states = all_state_bytes(model, config, dtype, ranks)
        cache = resolved.num_kv_blocks * block_bytes(model, config, dtype, drafts, ranks) + states
        return resolved, shared.claim(use.total + cache)


def _rank_reasons(config: EngineConfig, resolved: ResolvedConfig) -> dict[str, str]:
    if (ranks := ranks_of(config)) == 1:
        return {}
    threads = threads_of_rank(resolved.num_threads, ranks)
    setting = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "expert_parallel_size"
    return {setting: f"asked for; of num_threads {resolved.num_threads}, each rank has {threads}"}


_KERNELS = dict(zip(KERNELS, (features.NATIVE, features.TORCH_CPU, features.REFERENCE), strict=True))


def _kernels(model: ModelConfig, config: EngineConfig) -> Choice:
    on = turned_on(config) | facts_of(model)
    try:
        choice = choose_kernels(
            config.kernels,
            head_dim=model.head_dim,
            block_size=config.block_size,
            inputs=(model.hidden_size, model.intermediate_size, *model.expert_sizes, *model.hybrid_sizes),
        )
    except ValueError as error:
        raise ConfigError(f"kernels is {config.kernels}. {error}") from error
    chosen = _KERNELS[choice.name]
    on[chosen] = f"the kernels are {choice.reason}"
    # Only conflicts of these kernels: the settings are the main model's, and `model` may be the draft model.
    if conflict := find_conflict(on, feature=chosen):
        raise ConfigError(conflict.text(on))
    return choice


def _draft(checkpoint: DraftCheckpoint | None, config: EngineConfig) -> DraftStart | None:
    """Choose the draft model's kernels, and in how many bits its weights are held. config: see _alone."""
    if checkpoint is None:
        return None
    try:
        kernels = _kernels(checkpoint.model, config)
    except ConfigError as error:  # the text names settings, which could be either model's
        raise ConfigError(f"speculative.model is {config.speculative.model}, for which {error}") from error
    settled, why_bits = settle_quantize(checkpoint.directory, checkpoint.model, config, kernels)
    reasons = {f"{setting} of the draft model": reason for setting, reason in why_bits.items()}
    return DraftStart(checkpoint, settled, kernels, reasons)
