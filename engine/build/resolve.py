"""Owns how the config is resolved to what is served: limits, types, threads and blocks, each with its reason.
Never allocates or loads anything: it reads a few small files and the machine's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.build.end_tokens import end_tokens
from engine.build.facts import facts_of
from engine.build.host_fit import HostBudget, kept_on_cpu
from engine.build.kv_tiers import tier_block_bytes
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SchedulerConfig
from engine.execution.device import Device
from engine.features import DRAFTS, GPU, Conflict, find_conflict
from engine.host.cores import refused_threads, usable_threads
from engine.models.config import ModelConfig
from engine.models.kv_cache import bytes_per_block, cache_dtype
from engine.models.narrow import Keep, Narrow
from engine.models.packing import Packing
from engine.models.recurrent_state import memory_summary, state_bytes
from engine.models.shards import parts_of
from engine.models.stored_forms import in_integers, why_unpacked
from kernels.choice import NATIVE, Choice
from kernels.cpu.native.library import byte_products, vector_level
from kernels.cpu.processor import cpu_flags

_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # the last one is Arm's


def resolve(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    kernels: Choice,
    device: tuple[Device, str],
    memory: HostBudget | tuple[int, str],
    draft: tuple[ModelConfig, float] | None = None,
    keep: Keep | None = None,
    ranks: Sequence[int] | None = None,
    num_here: int | None = None,
) -> ResolvedConfig:
    """Resolve `config` for this machine and this checkpoint.

    device: with the reason for it. memory: how much KV blocks may take, or their number and its reason. draft: a draft
    model and its cost; see SpeculativeConfig.model_cost. keep: which packed weights a GPU's kernels use as stored;
    None: those that a CPU's do. ranks: those on this machine that compute the model together, whose memory counts.
    num_here: how many of the engine's ranks are on this machine, whose threads count. None for either: all.

    Raises:
        ConfigError: a setting asks for more than the checkpoint or the memory can give.
        CheckpointError: see end_tokens.
    """
    max_model_len, length_reason = _max_model_len(model, config)
    eos_token_ids, ends_reason = end_tokens(model_dir, model.vocab_size)
    dtype, dtype_reason = resolve_dtype(config, device[0])
    if isinstance(memory, HostBudget):
        memory = _num_blocks(model, config, dtype, draft[0] if draft else None, memory, max_model_len, ranks)
    num_blocks, blocks_reason = memory
    num_threads, threads_reason = _num_threads(config, num_here)
    scheduler, halving_reason = _scheduler(model, config)
    same_bits = kernels.name == NATIVE
    on_gpu = () if device[0].capability is None else (GPU,)
    undrafted = find_conflict((*facts_of(model), *on_gpu), feature=DRAFTS)
    return ResolvedConfig.of(
        config,
        drafts=undrafted is None,
        unseen_drafts=same_bits,
        model_cost=draft[1] if draft else None,
        eight_bits=same_bits and model.quantization is not None and all(model.quantization.by_output),
        scheduler=scheduler,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        vocab_size=model.vocab_size,
        headless=model.headless,
        eos_token_ids=eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        device=device[0].name,
        kernels=kernels.name,
        num_threads=num_threads,
        recurrent_state=bool(model.linear_layers),
        kv_block_bytes=block_bytes(model, config, dtype, None),
        tier_block_bytes=tier_block_bytes(model, config, dtype),
        reasons={
            "max_model_len": length_reason,
            "eos_token_ids": ends_reason,
            "device": device[1],
            "dtype": dtype_reason,
            "num_kv_blocks": blocks_reason,
            "num_threads": threads_reason,
            "kernels": kernels.reason,
            "chunk_halving_context": halving_reason,
            "speculative": _why_drafts(config, same_bits, draft, undrafted),
        }
        | ({"lm_head": "the checkpoint has none: the model makes embeddings alone"} if model.headless else {})
        | ({"recurrent_state": memory_summary(model, config, dtype)} if model.linear_layers else {})
        | ({"kv_cache_dtype": _narrow_cache(model, config, dtype)} if config.kv_cache_dtype != "auto" else {})
        | ({"activations": _rounded(dtype)} if config.rounds_activations else {})
        | _weights(model, config, dtype, keep or kept_on_cpu(config, native=same_bits)),
    )


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type that ResolvedConfig.dtype names."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def _max_model_len(model: ModelConfig, config: EngineConfig) -> tuple[int, str]:
    longest = model.longest_position
    why = f"(max_position_embeddings {model.max_position_embeddings}, RoPE {model.rope.rope_type} "
    why += f"with factor {model.rope.factor:g})"
    if longest == model.dense_positions:
        why = "without dual chunk attention (dual_chunk_attention_config), which is not supported"
    if config.max_model_len is None:
        served = model.rope.default_length(model.max_position_embeddings)
        if served > longest:
            return longest, f"as many as the checkpoint serves {why}"
        return served, f"what the checkpoint was trained for (RoPE {model.rope.rope_type})"
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the checkpoint serves at most {longest} positions {why}."
        )
    return config.max_model_len, f"asked for; the checkpoint serves up to {longest}"


def resolve_dtype(config: EngineConfig, device: Device) -> tuple[torch.dtype, str]:
    """Return the type of weights and KV cache, and the reason for it."""
    if config.dtype != "auto":
        return torch_dtype(config.dtype), "asked for"
    if device.capability is not None:
        found = f"compute capability {device.capability[0]}.{device.capability[1]}"
        if device.capability >= (8, 0):
            return torch.bfloat16, f"the GPU multiplies bfloat16 natively ({found})"
        return torch.float32, f"the GPU has no native bfloat16 ({found}; from 8.0 on)"
    flags = cpu_flags()
    for flag in _BF16_FLAGS:
        if flag in flags:
            return torch.bfloat16, f"the CPU multiplies bfloat16 natively ({flag})"
    return torch.float32, f"the CPU has none of {', '.join(_BF16_FLAGS)}, so bfloat16 would be emulated"


def block_bytes(
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    draft: ModelConfig | None,
    ranks: Sequence[int] | None = None,
) -> int:
    """Return the bytes of a KV block on these ranks, some of which may have the same KV heads, and of the draft model's
    block of the same number. ranks: None: all, here and below."""
    kept = cache_dtype(config.kv_cache_dtype, dtype)
    shapes = [*parts_on(model, config, ranks), *([] if draft is None else [draft])]
    return sum(bytes_per_block(shape, config.block_size, kept) for shape in shapes)


def all_state_bytes(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, ranks: Sequence[int] | None = None
) -> int:
    """Return the bytes of recurrent states on these ranks."""
    return sum(state_bytes(part, config, dtype) for part in parts_on(model, config, ranks))


def parts_on(model: ModelConfig, config: EngineConfig, ranks: Sequence[int] | None = None) -> list[ModelConfig]:
    """Return the parts of a model that these ranks have."""
    parts = parts_of(model, config.tensor_parallel_size)
    return parts if ranks is None else [parts[rank] for rank in ranks]


def _num_blocks(
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    draft: ModelConfig | None,
    memory: HostBudget,
    max_model_len: int,
    ranks: Sequence[int] | None,
) -> tuple[int, str]:
    size = block_bytes(model, config, dtype, draft)
    here = block_bytes(model, config, dtype, draft, ranks), all_state_bytes(model, config, dtype, ranks)
    drafts = size - block_bytes(model, config, dtype, None)
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks, reason = memory.blocks(config, size, all_state_bytes(model, config, dtype), most, here)
    return blocks, f"{reason}, {drafts} of them the draft model's" if drafts else reason


def weights_read(model: ModelConfig) -> int:
    """Count the weights that a step reads for one token, including the LM head's."""
    return model.num_layers * _products(model) + model.vocab_size * model.hidden_size


def _products(model: ModelConfig) -> int:
    """Count the multiplications that a layer's matrices take per token."""
    size = model.num_heads * model.head_dim
    projections = model.hidden_size * (2 * size + 2 * model.num_kv_heads * model.head_dim)
    return projections + 3 * model.hidden_size * model.multiplied_intermediate_size


def _scheduler(model: ModelConfig, config: EngineConfig) -> tuple[SchedulerConfig, str]:
    """Return the scheduler's config, with `chunk_halving_context` set to where attending to the context costs as much
    as a token's matrix products."""
    asked = config.scheduler
    if asked.chunk_owner == "engine":
        return asked, "chunk_owner engine does not cut prompts"
    if not asked.enable_chunked_prefill:
        return asked, "enable_chunked_prefill false does not cut prompts"
    if asked.chunk_halving_context is not None:
        return asked, "asked for"
    if config.targets.tpot_ms is not None:
        return replace(asked, chunk_halving_context=0), "targets.tpot_ms limits a chunk by its predicted time"
    size, products = model.num_heads * model.head_dim, _products(model)
    attending = model.num_attention_layers
    # q·k and p·v: two products of `size` per token of the context, in the layers with attention.
    context = max(1, products * model.num_layers // (2 * size * attending))
    where = "" if attending == model.num_layers else f" in {attending} of {model.num_layers} layers"
    return replace(asked, chunk_halving_context=context), (
        f"a layer multiplies {products} numbers for a token, and {2 * size} for each token that it attends to{where}"
    )


def _why_drafts(
    config: EngineConfig,
    same_bits: bool,
    draft: tuple[ModelConfig, float] | None,
    undrafted: Conflict | None,
) -> str:
    if undrafted is not None:
        return f"none: {undrafted.rule.reason}"
    if config.speculative.method != "auto":
        cost = "" if draft is None else f"; a pass of the draft model takes {draft[1]:.2f} of a step, by what both read"
        return f"asked for{cost}"
    if not same_bits:
        return "none: these kernels' sums depend on how many rows a step has, and so would near ties"
    if config.num_speculative_tokens == 0:
        return "none: num_speculative_tokens 0"
    if config.overlap and config.num_speculative_tokens is None:
        return "none: overlap, with which drafts must be asked for"
    return "these kernels give the same answers to the bit with drafts, where the step has room for any"


def _narrow_cache(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> str:
    asked, plain = (
        bytes_per_block(model, config.block_size, cache_dtype(name, dtype)) for name in (config.kv_cache_dtype, "auto")
    )
    return f"asked for; {asked} bytes a block, scales included, instead of {plain}"


def _rounded(dtype: torch.dtype) -> str:
    rest = str(dtype).removeprefix("torch.")
    return (
        f"asked for; rounded to 8 bits in blocks of 32 for weights of 4 to 8 bits ({byte_products()}), and {rest} for "
        "all others"
    )


def _weights(model: ModelConfig, config: EngineConfig, dtype: torch.dtype, keep: Keep) -> dict[str, str]:
    """Say how the weights are used, if the checkpoint packs them or a GPU rounds them."""
    name, packed = str(dtype).removeprefix("torch."), model.quantization
    rounded, on_gpu = config.quantize == "int8", keep is Keep.NARROW
    if packed is None:
        return {"weights": "rounded to 8 bits (quantize int8)"} if rounded and on_gpu else {}
    if config.load_format == "dummy":
        drawn = "8 bits" if rounded and on_gpu else name
        return {"weights": f"random numbers in {drawn}, where the checkpoint has {packed.summary}"}
    wide = "rounded anew to 8 bits (quantize int8)" if rounded else f"computed in {name}"
    rounds = config.rounds_activations
    ways = dict.fromkeys(_way(packing, keep, wide, rounds) for _, packing in packed.groups)
    if config.activations == "fp8":
        activations = f"; activations are rounded to fp8 for many tokens, otherwise they stay {name}"
    else:
        stay = packed.activations and not rounds
        activations = f"; activations stay {name}, not {packed.activations}" if stay else ""
    return {"weights": f"{packed.summary}: {' and '.join(ways)}{activations}"}


def _way(packing: Packing, keep: Keep, wide: str, rounds: bool) -> str:
    """Say how matrices of one packing are used. wide: how those are that are unpacked. rounds: whether activations are
    rounded."""
    if keep is Keep.GROUPED and not packing.by_output:
        if (apart := why_unpacked(packing)) is not None:
            return f"{wide}, because {apart}"
        if rounds and in_integers(packing):
            return f"kept as stored, and multiplied as bytes ({byte_products()})"
        return f"kept as stored, and widened in registers ({vector_level()})"
    if keep is not Keep.NARROW:
        return "kept in 8 bits" if keep.by_output and packing.by_output else wide
    layout = packing.narrow(zeros=False)
    why_not = layout if isinstance(layout, str) else layout.why_not
    if why_not is not None:
        return f"{wide}, because {why_not}"
    assert isinstance(layout, Narrow)
    return f"kept in {layout.name}" + (", in the order of the inputs' groups" if layout.order else "")


def _num_threads(config: EngineConfig, num_here: int | None = None) -> tuple[int, str]:
    """Return the threads of all ranks together, of which those elsewhere have theirs there."""
    size = config.tensor_parallel_size * config.expert_parallel_size
    here = size if num_here is None else num_here
    if config.num_threads is not None:
        if (refusal := refused_threads(config.num_threads * here // size)) is not None:
            raise ConfigError(f"{refusal}{_of_all(config.num_threads, here, size)}.")
        return config.num_threads, "num_threads in the config, or this replica's share of the machine's cores"
    threads, reason = usable_threads()
    return threads * size // here, reason + _of_all(threads * size // here, here, size)


def _of_all(num_threads: int, here: int, size: int) -> str:
    return f"; {here} of {size} ranks are on this machine, and all have {num_threads}" * (here < size)
