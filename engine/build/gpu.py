"""Owns the start of an engine on a GPU: weights, trial steps, KV blocks in the rest, captures. Long: each part is
measured, or refused, before the next.
Never computes a request's step, and never guesses what can be measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from engine.batch.grammar import read_grammars
from engine.build.batch_invariance import check_batch_invariance
from engine.build.facts import facts_of
from engine.build.gpu_ranks import (
    FollowingGpu,
    LeadingGpu,
    OneGpu,
    Together,
    Trial,
    check_gpu_ranks,
    not_every_rank,
    start_gpu_ranks,
)
from engine.build.host_fit import claim_tiers
from engine.build.kv_tiers import TierMemory, check_key, open_files, tier_memory, tier_reasons
from engine.build.model import ModelBuilder
from engine.build.rank_start import GpuSpecification
from engine.build.resolve import all_state_bytes, resolve, resolve_dtype
from engine.build.trial_steps import (
    decode_blocks,
    drafts_step,
    largest_step,
    longest_decode_step,
    longest_rows_step,
    short_decode_step,
)
from engine.config import ConfigError, EngineConfig, ResolvedConfig, refuse_conflicts
from engine.execution.device import Device, StateLostError, TorchThreads, device_faults
from engine.execution.gpu.adapters import AdapterSlots, slots_bytes
from engine.execution.gpu.cuda_graph_buckets import Buckets, plan_buckets
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.expert_launches import warm_up_experts
from engine.execution.gpu.kv_blocks import DeviceBlockCopier, buffer_bytes
from engine.execution.gpu.launch_cost import measure_launch
from engine.execution.gpu.linear_launches import warm_up_linear
from engine.execution.gpu.memory import (
    GIB,
    MemoryUse,
    blocks_to_time_with,
    check_adapters_fit,
    check_blocks_fit,
    check_states_fit,
    kv_blocks_that_fit,
)
from engine.execution.gpu.model import DeviceModel
from engine.execution.gpu.narrow import NarrowProducts, pack_narrow
from engine.execution.gpu.sampler import warm_up_sampler
from engine.features import (
    GPU,
    GRAPHS,
    NO_CAPTURES,
    NO_FP8_PRODUCTS,
    NO_FP8_WEIGHTS,
    NO_GRAPHS,
    TORCH_ADAPTERS,
    TORCH_EXPERTS,
    TORCH_PRODUCTS,
    TORCH_STATES,
    UNCAPTURED_ATTENTION,
    WIDE_ATTENTION,
    Feature,
    find_conflict,
    turned_on,
)
from engine.host.shares import Claim
from engine.models.config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.description import Shard
from engine.models.kv_cache import KVCache, blocks_in, bytes_per_block, cache_dtype
from engine.models.narrow import Keep
from engine.models.recurrent_state import RecurrentState, state_bytes
from engine.models.shards import parts_of, vocab_sizes
from engine.parallel.model_digest import model_digest
from engine.parallel.processes import RankLauncher
from engine.step import ExecutorFatalError, ExecutorOutOfMemoryError, StepPlan
from engine.tiers.copier import BlockFiles
from engine.tiers.mover import TierMover
from kernels.choice import Choice, choose_attention
from kernels.collectives.group import LEADER, RankLostError
from kernels.eager.ops import Ops

logger = logging.getLogger(__name__)

GPU_MEMORY_UTILIZATION = 0.9
"""The default share of the GPU's memory."""


def start_on_device(
    model_dir: Path,
    config: EngineConfig,
    device: Device,
    reason: str,
    launcher: RankLauncher | None = None,
    follows: FollowingGpu | None = None,
) -> GpuStart:
    """Check and choose everything before a weight is read. reason: why this device was chosen. launcher: starts the
    engine's other ranks, if it has several; None: as children of this process. follows: this is one of those.

    Raises:
        CheckpointError: the checkpoint is not supported.
        ConfigError: the config asks for more than the checkpoint or the device can give.
    """
    on = {**turned_on(config), GPU: f"this engine runs on {device.name}"}
    refuse_conflicts(on)
    check_key(config)
    model = read_model_config(model_dir)
    refuse_conflicts(on | facts_of(model))
    if follows is None:
        check_gpu_ranks(launcher, config.tensor_parallel_size)
    part = parts_of(model, config.tensor_parallel_size)[LEADER if follows is None else follows.shard.rank]
    dtype, _ = resolve_dtype(config, device)
    attention, ops = _attention(model, config, device, dtype)
    buckets, why_graphs = _buckets(config, device, attention, ops, model)
    measured_later = (1, "measured once the weights are loaded")
    keep = Keep.NOTHING if ops.narrow is None else Keep.NARROW
    resolved = resolve(model_dir, model, config, attention, (device, reason), measured_later, keep=keep)
    tiers = tier_memory(model, config, dtype)
    reasons = {"cuda_graphs": why_graphs, **tier_reasons(config, tiers), **_rank_reasons(config)}
    resolved = replace(resolved, reasons=resolved.reasons | reasons)

    def runner(decoder: Decoder, cache: KVCache, state: RecurrentState | None) -> DeviceModel:
        size, longest = resolved.block_size, resolved.max_model_len
        return DeviceModel(decoder, ops, cache, device, block_size=size, max_model_len=longest, state=state)

    builder = ModelBuilder(
        model_dir=model_dir,
        model=part,
        config=config,
        resolved=resolved,
        runner=runner,
        device=device.torch_device,
        keep=keep,
        rounded=config.quantize == "int8",
        round_inputs=config.activations == "fp8",
    )

    def gather() -> Together:
        if follows is not None or config.tensor_parallel_size == 1:
            return follows or OneGpu()

        def specify(shard: Shard, place: str) -> bytes:
            return GpuSpecification(shard=shard, place=place, model_dir=model_dir, config=config).encode()

        size = config.tensor_parallel_size
        return start_gpu_ranks(launcher, size, device, vocab_sizes(model, size), specify)

    return GpuStart(builder, model, device, attention, ops, buckets, dtype, tiers, claim_tiers(config, tiers), gather)


class GpuStart:
    """An engine that is ready to start on a GPU: everything is checked and chosen, but no weight has been read."""

    def __init__(
        self,
        builder: ModelBuilder[DeviceModel],
        whole: ModelConfig,
        device: Device,
        attention: Choice,
        ops: Ops,
        buckets: Buckets,
        dtype: torch.dtype,
        tiers: TierMemory,
        claim: Claim | None,
        gather: Callable[[], Together],
    ) -> None:
        """builder: of this rank's part of `whole`. gather: starts the other ranks, if there are any."""
        self._tiers, self._claim, self._attention = tiers, claim, attention
        self._whole, self._gather = whole, gather
        self._together: Together = OneGpu()
        self._builder, self._config, self.resolved = builder, builder.config, builder.resolved
        self._device, self._ops, self._buckets, self._dtype = device, ops, buckets, dtype
        kept = cache_dtype(builder.config.kv_cache_dtype, dtype)
        self._block_bytes = bytes_per_block(builder.model, builder.config.block_size, kept)
        self._narrow = NarrowProducts()
        self._spare_blocks = 1 if buckets.all else 0  # for the padding of captured steps
        self._adapters: AdapterSlots | None = None

    def build(self) -> tuple[DeviceExecutor, ResolvedConfig]:
        """Load the weights directly to the device, measure the memory that steps take, and give the rest to KV blocks.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            ConfigError: the config asks for more than the device's memory can give, or the directory for KV cannot be
                used.
        """
        with ExitStack() as undone:
            # Before the weights, which take long.
            files = open_files(self._builder.model_dir, self._builder.model, self._config, self.resolved, self._tiers)
            if files is not None:
                undone.callback(files.close)
            with self._ranks_start():
                undone.callback(self._together.end)
                built = self._built(files)
            undone.pop_all()
        return built

    def follow(self) -> None:
        """Load this rank's part, start with the others, and follow until the leader ends.

        Raises: as build, and as engine.parallel.device_follower.DeviceFollower.run.
        """
        from engine.parallel.device_follower import DeviceFollower  # one GPU needs no package for messages

        with self._ranks_start():
            TorchThreads(self.resolved.num_threads).use()
            model, *_ = self._ready()
            assert isinstance(self._together, FollowingGpu)
            DeviceFollower(model, self._together.ranks, self._device).run()

    @contextmanager
    def _ranks_start(self) -> Iterator[None]:
        """Raise ConfigError if the ranks do not start together."""
        self._together = self._gather()
        try:
            yield
        except (ExecutorFatalError, RankLostError) as error:
            if self._together.started is None:
                raise
            raise not_every_rank(self._config.tensor_parallel_size, error) from error

    def _built(self, files: BlockFiles | None) -> tuple[DeviceExecutor, ResolvedConfig]:
        """Build the engine on the device. The executor owns files, and ends the other ranks."""
        model, use, resolved = self._ready()
        executor = DeviceExecutor(
            model,
            self._device,
            num_threads=resolved.num_threads,
            grammars=read_grammars(self._builder.model_dir, resolved),
            kv_mover=self._mover(model, use, files),
            ranks=self._together.started,
            claim=self._claim,
        )
        if isinstance(self._together, LeadingGpu):
            self._together.ranks.start_serving()
        return executor, resolved

    def _ready(self) -> tuple[DeviceModel, MemoryUse, ResolvedConfig]:
        """Load this rank's part of the model, and measure and capture steps together with the other ranks."""
        free, total = self._device.memory()
        decoder = self._load(free, total)
        self._together.meet(self._computes)  # what connections take counts as weights
        loaded = self._device.memory()[0]
        use = MemoryUse(total=total, others=total - free, weights=free - loaded, activations=0)
        if self._config.kv_tiers.any:
            use = replace(use, moving=buffer_bytes(self._block_bytes))
        use = self._measure(decoder, self._reserve_adapters(decoder, use))
        num_blocks, why_blocks = self._num_blocks(use)
        reasons = self.resolved.reasons | {"num_kv_blocks": why_blocks}
        if "weights" in reasons:
            reasons["weights"] += f"; {self._narrow.summary}"
        resolved = replace(self.resolved, num_kv_blocks=num_blocks, reasons=reasons)
        model = self._attach(decoder, num_blocks)
        if self._buckets.all:
            with self._captures_fit(use, f"the largest step and {num_blocks} KV blocks"):
                model.capture(self._buckets)
        if self._config.batch_invariant:
            with device_faults():
                check_batch_invariance(model, resolved, self._device)
        return model, use, resolved

    @property
    def _computes(self) -> str:
        """What must be the same on all ranks: else they capture other steps, or add up parts of different models."""
        device, digest = self._device, model_digest(self._builder.model_dir)
        chooses = "torch chooses" if self._ops.sample_packed is None else "kernels choose"
        return (
            f"the model {digest}, computed by {self._attention.name} with {self._ops.name} (torch {torch.__version__}) "
            f"on {device.name}, where {chooses} tokens, and {self._buckets.text}"
        )

    def release(self) -> None:
        """Give up the claim on the host's memory. The GPU's is not reserved: one engine has it to itself."""
        if self._claim is not None:
            self._claim.release()

    def _mover(self, model: DeviceModel, use: MemoryUse, files: BlockFiles | None) -> TierMover | None:
        if not self._config.kv_tiers.any:
            return None
        with _fits("The GPU has no memory for buffers of kv_tiers", use, "gpu_memory_utilization"), device_faults():
            copier = DeviceBlockCopier(model.cache, self._device)
        return TierMover(copier, host_blocks=self._tiers.host_blocks, files=files, pin=self._device.pin)

    def _load(self, free: int, total: int) -> Decoder:
        """Load the weights. free, total: the device's memory beforehand, in bytes."""
        try:
            with device_faults():
                decoder = self._builder.load()
                decoder.weights, self._narrow = pack_narrow(decoder.weights, self._ops.narrow)
        except ExecutorOutOfMemoryError as error:
            raise ConfigError(
                f"The weights of {self._builder.model_dir} in {self.resolved.dtype} do not fit: {free / GIB:.2f} of "
                f"{self._device.name}'s {total / GIB:.2f} GiB were free."
            ) from error
        self._device.release_unused()
        return decoder

    def _reserve_adapters(self, decoder: Decoder, use: MemoryUse) -> MemoryUse:
        """Allocate the slots of LoRA adapters, before anything is sized by the memory that is left."""
        num_slots, max_rank = self._config.max_loras, self._config.max_lora_rank
        if not num_slots:
            return use
        size = slots_bytes(self._builder.model, self._dtype, num_slots=num_slots, max_rank=max_rank)
        use = replace(use, adapters=size)
        check_adapters_fit(use, num_slots, max_rank)
        why = f"max_loras is {num_slots} and max_lora_rank {max_rank}, but the GPU has no memory for such adapters"
        with _fits(why, use, "max_loras or max_lora_rank"), device_faults():
            self._adapters = AdapterSlots(decoder, self._ops, self._device, num_slots=num_slots, max_rank=max_rank)
        return use

    def _attach(self, decoder: Decoder, num_blocks: int) -> DeviceModel:
        """Make the model, with a KV cache of `num_blocks` and the spare blocks for padding."""
        num_blocks += self._spare_blocks
        try:
            with device_faults():
                model = self._builder.attach(decoder, num_blocks)
        except ExecutorOutOfMemoryError as error:
            free, total = self._device.memory()
            raise ConfigError(
                f"{num_blocks} KV blocks of {self._block_bytes} bytes do not fit: {free / GIB:.2f} of "
                f"{self._device.name}'s {total / GIB:.2f} GiB were free. Set num_kv_blocks or gpu_memory_utilization "
                "lower."
            ) from error
        model.adapters, model.ranks = self._adapters, self._together.ranks
        return model

    def _measure(self, decoder: Decoder, use: MemoryUse) -> MemoryUse:
        """Measure what the largest steps take and what captures keep, on a KV cache that is just large enough."""
        resolved = self.resolved
        plan = largest_step(resolved)
        use = replace(use, states=state_bytes(self._builder.model, resolved, self._dtype))
        check_states_fit(use)
        num_blocks = self._together.least(
            blocks_to_time_with(
                use,
                self._utilization,
                self._block_bytes,
                least=len(plan.rows[0].block_ids),
                most=sum(decode_blocks(resolved, None)),
            )
        )
        probe = self._attach(decoder, num_blocks)
        before = self._device.memory()[0]
        trial = self._together.trial(probe, self._device, self.resolved.num_threads)
        why = f"max_num_batched_tokens is {resolved.max_num_batched_tokens}, but the GPU has no memory for such a step"
        with _fits(why, use, "max_num_batched_tokens"), self._trial_adapter() as adapter:
            with device_faults():
                warm_up_experts(decoder, self._ops, plan.num_tokens)
                warm_up_linear(decoder, self._ops, plan.num_tokens, adapters=self._adapters is not None)
            _run(trial, plan, adapter)
            self._leave_out_large_captures(trial, plan)
            with device_faults(), torch.inference_mode():
                self._warm_up_sampler()
                if self._ops.narrow is not None:
                    self._narrow.warm_up(self._ops.narrow, self._dtype, self._device.torch_device)
        # Before any capture: kernels choose their configurations for good at their first launch, and a capture's first
        # step consists of padding.
        rows = f"max_num_seqs is {resolved.max_num_seqs} and max_model_len {resolved.max_model_len}"
        why = f"{rows}, but the GPU has no memory for a decode step of such rows"
        with _fits(why, use, "max_num_seqs or max_model_len"), self._trial_adapter() as adapter:
            _run(trial, longest_decode_step(resolved, num_blocks), adapter)
            _run(trial, short_decode_step(resolved, num_blocks), adapter)
            in_units = self._config.batch_invariant
            _run(trial, longest_rows_step(resolved, num_blocks, in_units=in_units), adapter)
        self._try_drafts(trial, num_blocks, use)
        # torch keeps the memory of these steps for later ones, so what is free now stays free whatever those are.
        use = replace(use, activations=max(0, before - self._device.memory()[0]))
        if self._buckets.all:
            use = self._measure_captures(probe, use, before)
        trial.end()
        del probe, trial
        self._device.release_unused()
        logger.info("device memory: %s", use.text())
        return use

    def _try_drafts(self, trial: Trial, num_blocks: int, use: MemoryUse) -> None:
        """Run a step with the most drafts, if rows may have any: those of a model with recurrent state have none."""
        resolved = self.resolved
        if not resolved.num_speculative_tokens or resolved.recurrent_state:
            return
        drafts = f"num_speculative_tokens is {resolved.num_speculative_tokens} and max_num_seqs {resolved.max_num_seqs}"
        why = f"{drafts}, but the GPU has no memory for a step with so many drafts"
        with _fits(why, use, "num_speculative_tokens or max_num_seqs"), self._trial_adapter() as adapter:
            _run(trial, drafts_step(resolved, num_blocks), adapter)

    def _warm_up_sampler(self) -> None:
        """Choose tokens in every way, from logits as steps have them: those that ranks join are float32."""
        ranks = self._together.ranks
        if ranks.chooses:
            dtype = self._dtype if ranks.group is None else torch.float32
            warm_up_sampler(self._device, self._ops, dtype, self.resolved.vocab_size)

    def _leave_out_large_captures(self, trial: Trial, plan: StepPlan) -> None:
        """Capture no mixed step of a size at which launching it is hidden behind the device's work, unless the config
        names the sizes. plan: the largest step, which has run before."""
        if not self._buckets.mixed_tokens or self._config.cuda_graph_mixed_tokens is not None:
            return
        with device_faults(), torch.inference_mode():
            cost = measure_launch(self._device, lambda: trial.compute(plan), plan.num_tokens)
        before, most = self._buckets, len(self._buckets.without_hidden_launches(cost).mixed_tokens)
        most = self._together.least(most)
        self._buckets = replace(before, mixed_tokens=before.mixed_tokens[:most])
        if self._buckets != before:
            why = (
                f"{self.resolved.reasons['cuda_graphs']}, of which {len(self._buckets.all)} are captured: the host "
                f"launches {cost.num_tokens} tokens in {cost.launch_ms:.1f} ms, on which the GPU works "
                f"{cost.device_ms:.1f} ms, so that steps of more than {self._buckets.mixed_tokens[-1]} tokens run "
                "without padding"
            )
            self.resolved = replace(self.resolved, reasons=self.resolved.reasons | {"cuda_graphs": why})

    def _trial_adapter(self) -> AbstractContextManager[str]:
        """Return a context with the adapter of trial steps, whose memory is the most with one; "" if there is none."""
        return nullcontext("") if self._adapters is None else self._adapters.trial()

    def _measure_captures(self, probe: DeviceModel, use: MemoryUse, before: int) -> MemoryUse:
        """Measure what captures keep, which no step can use, and what running them takes. before: free bytes before any
        step."""
        device = self._device
        with self._captures_fit(use, "the largest step"):
            probe.warm_up(self._buckets)
            use = replace(use, activations=max(use.activations, before - device.memory()[0]))
            # A capture would release it, and memory that steps had cached would hide what captures keep.
            device.release_unused()
            released = device.memory()[0]
            probe.capture(self._buckets)
            device.release_unused()
        return replace(use, graphs=max(0, released - device.memory()[0]))

    @contextmanager
    def _captures_fit(self, use: MemoryUse, beside: str) -> Iterator[None]:
        """Raise ConfigError if the device runs out of memory in the body. beside: what else has memory then, for the
        message."""
        try:
            with device_faults():
                yield
        except ExecutorOutOfMemoryError as error:
            raise ConfigError(
                f"cuda_graphs is {self._config.cuda_graphs}, but the GPU does not have enough memory to capture "
                f"its {len(self._buckets.all)} graph sizes in addition to {beside}: {use.text()}. Set fewer "
                "cuda_graph_* sizes, or cuda_graphs: none."
            ) from error

    def _num_blocks(self, use: MemoryUse) -> tuple[int, str]:
        config, spare = self._config, self._spare_blocks
        asked, why = config.num_kv_blocks, "asked for"
        if asked is None and config.kv_cache_memory_gib is not None:
            states, size = all_state_bytes(self._whole, config, self._dtype), self.resolved.kv_block_bytes
            asked = blocks_in(config.kv_cache_memory_gib, size, states)
            less = f", less {states} bytes of recurrent state," if states else ""
            why = f"kv_cache_memory_gib {config.kv_cache_memory_gib:g}{less} at {size} bytes a block"
        if asked is not None:
            name = "num_kv_blocks" if config.num_kv_blocks is not None else "kv_cache_memory_gib"
            setting = f"{name} {getattr(config, name):g}"
            check_blocks_fit(use, self._block_bytes, asked, spare_blocks=spare, setting=setting)
            return asked, f"{why}; {use.text()}"
        own = kv_blocks_that_fit(use, self._utilization, self._block_bytes, spare_blocks=spare)
        found = self._together.least(own)
        least = f", on the rank with the least room; {own} here" if found < own else ""
        return found, f"what gpu_memory_utilization {self._utilization:g} leaves{least}; {use.text()}"

    @property
    def _utilization(self) -> float:
        return self._config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION


@contextmanager
def _fits(why: str, use: MemoryUse, settings: str) -> Iterator[None]:
    """Raise ConfigError if the device runs out of memory in the body. settings: those to lower, for the message."""
    try:
        yield
    except (ExecutorOutOfMemoryError, StateLostError, ExecutorFatalError) as error:
        # Of several ranks, an error is fatal, and its cause says what it was.
        cause = error.__cause__ if isinstance(error, ExecutorFatalError) else error
        if not isinstance(cause, ExecutorOutOfMemoryError | StateLostError):
            raise
        raise ConfigError(f"{why} in addition to the weights: {use.text()}. Lower {settings}.") from error


def _run(trial: Trial, plan: StepPlan, adapter: str) -> None:
    trial.run(replace(plan, rows=tuple(row._replace(adapter=adapter) for row in plan.rows)))


def _rank_reasons(config: EngineConfig) -> dict[str, str]:
    if config.tensor_parallel_size == 1:
        return {}
    return {"tensor_parallel_size": "asked for; each rank has a GPU of its own"}


def _attention(model: ModelConfig, config: EngineConfig, device: Device, dtype: torch.dtype) -> tuple[Choice, Ops]:
    try:
        return choose_attention(
            config.attention,
            dtype=dtype,
            head_dim=model.head_dim,
            block_size=config.block_size,
            capability=device.capability,
            narrow_cache=config.kv_cache_dtype != "auto",
            batch_invariant=config.batch_invariant,
        )
    except ValueError as error:
        raise ConfigError(f"attention is {config.attention}. {error}") from error


def _buckets(
    config: EngineConfig, device: Device, attention: Choice, ops: Ops, model: ModelConfig
) -> tuple[Buckets, str]:
    lacking = _lacking(device, attention, ops) | _without_fp8(device, ops, model, config)
    on = {**turned_on(config), **facts_of(model), **lacking}
    refuse_conflicts(on)
    conflict = find_conflict(on, feature=GRAPHS)
    scope = config.cuda_graphs
    reason = "asked for"
    if scope == "auto":
        scope = "all" if conflict is None else "none"
        reason = "all: the attention can be captured" if conflict is None else f"none: {conflict.rule.reason}"
    if scope == "none":
        refuse_conflicts(on | {NO_GRAPHS: f"cuda_graphs is none ({reason})"})
    sizes = {name: getattr(config, f"cuda_graph_{name}") for name in ("decode_rows", "mixed_tokens", "mixed_rows")}
    buckets = plan_buckets(
        scope,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        adapters=bool(config.max_loras),
        **sizes,
    )
    return buckets, f"{reason}; {len(buckets.all)} sizes"


def _without_fp8(device: Device, ops: Ops, model: ModelConfig, config: EngineConfig) -> dict[Feature, str]:
    """Return what keeps activations from being rounded to fp8: the device's, and the weights'."""
    needed, has, packed = None if ops.narrow is None else ops.narrow.fp8_from, device.capability, model.quantization
    found = {}
    if needed is None or has is None or has < needed:
        version = "no compute capability" if has is None else f"compute capability {has[0]}.{has[1]}"
        found[NO_FP8_PRODUCTS] = f"{device.name} has {version}"
    if config.load_format == "dummy":
        found[NO_FP8_WEIGHTS] = "load_format is dummy"
    elif packed is None or not packed.in_fp8:
        found[NO_FP8_WEIGHTS] = f"the weights are {'not packed' if packed is None else packed.summary}"
    return found


def _lacking(device: Device, attention: Choice, ops: Ops) -> dict[Feature, str]:
    """Return what this device, attention and table lack, as features that exclude others, each with a clause that
    names it."""
    by_torch = "torch's operators compute"
    found = {
        UNCAPTURED_ATTENTION: (ops.capturable, f"attention is {attention.name}"),
        WIDE_ATTENTION: (ops.narrow_cache, f"attention is {attention.name}"),
        NO_CAPTURES: (device.captures, f"{device.name} captures nothing"),
        TORCH_ADAPTERS: (ops.add_low_rank is not None, f"{by_torch} the matrices"),
        TORCH_EXPERTS: (ops.experts_capturable, f"{by_torch} the experts"),
        TORCH_STATES: (ops.states_capturable, f"{by_torch} the linear attention"),
        TORCH_PRODUCTS: (ops.narrow is not None, f"{by_torch} the matrix products"),
    }
    return {feature: text for feature, (captured, text) in found.items() if not captured}
