"""Owns rebuilding config.json from a GGUF file's metadata.
Never guesses: an architecture, head size or rope setting that it does not know is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.checkpoints.gguf_file import GGUFFile
from engine.checkpoints.gguf_tokenizer import special_token_ids
from engine.checkpoints.model_cache import ModelError

ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}


def build_config(gguf: GGUFFile) -> dict[str, Any]:
    """config.json of the model that a GGUF file's metadata describes. Raises ModelError."""
    arch = gguf.require("general.architecture", str)
    if arch not in _ARCHITECTURES:
        raise ModelError(f"{gguf.path}: architecture {arch!r} is not supported; expected {', '.join(_ARCHITECTURES)}.")
    hidden = gguf.require(f"{arch}.embedding_length", int)
    heads = gguf.require(f"{arch}.attention.head_count", int)
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor token_embd.weight is missing.")
    if heads < 1:
        raise ModelError(f"{gguf.path}: metadata {arch}.attention.head_count is {heads}; expected at least 1.")
    if not gguf.get(f"{arch}.attention.causal", bool, True):
        raise ModelError(f"{gguf.path}: metadata {arch}.attention.causal is False; expected True.")
    context = gguf.require(f"{arch}.context_length", int)
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        **_experts(gguf, arch),
        "vocab_size": gguf.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": gguf.require(f"{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": _head_dim(gguf, arch, hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": gguf.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        # The model was trained with full attention up to the window; beyond it, full attention would be wrong.
        "max_position_embeddings": min(context, gguf.get(f"{arch}.attention.sliding_window", int) or context),
        "rope_theta": gguf.get(f"{arch}.rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(gguf, arch),
        "attention_bias": arch == "qwen2",
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        **{name: ids[0] for name, ids in special_token_ids(gguf).items()},
    }


def _experts(gguf: GGUFFile, arch: str) -> dict[str, Any]:
    """The fields of a mixture of experts. Mixtral is `llama` with experts. llama.cpp normalises the shares of a token's
    experts in both, and has experts in every layer."""
    if arch != "qwen3moe" and not gguf.get(f"{arch}.expert_count", int):
        return {}
    count, per_token = gguf.require(f"{arch}.expert_count", int), gguf.require(f"{arch}.expert_used_count", int)
    if not 1 <= per_token <= count:
        raise ModelError(
            f"{gguf.path}: metadata {arch}.expert_used_count is {per_token}; "
            f"expected 1 to {arch}.expert_count, {count}."
        )
    if arch == "qwen3moe":
        size = gguf.require(f"{arch}.expert_feed_forward_length", int)
        fields: dict[str, Any] = {"num_experts": count, "moe_intermediate_size": size, "norm_topk_prob": True}
        return {"model_type": "qwen3_moe", "num_experts_per_tok": per_token, **fields}
    if arch == "llama":
        name = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return {**name, "num_local_experts": count, "num_experts_per_tok": per_token}
    raise ModelError(f"{gguf.path}: metadata {arch}.expert_count is {count}; expected no experts in {arch!r}.")


def _head_dim(gguf: GGUFFile, arch: str, default: int) -> int:
    """Size of a head. Keys, values and the rotated part must all have this size: Hugging Face's models have only
    one."""
    head_dim = gguf.get(f"{arch}.attention.key_length", int) or default
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        found = gguf.get(key, int, head_dim)
        if found != head_dim:
            raise ModelError(f"{gguf.path}: metadata {key} is {found}; expected the head size, {head_dim}.")
    return head_dim


def _rope_scaling(gguf: GGUFFile, arch: str) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling; None for plain rope. As in llama.cpp, a factor without a type means linear scaling,
    old files have another name for it, and of YaRN `yarn_attn_factor`, `yarn_ext_factor` and `yarn_log_multiplier` are
    ignored. The limits of YaRN are followed as in transformers, though llama.cpp ignores them."""
    scaling = f"{arch}.rope.scaling"
    factor = gguf.get(f"{scaling}.factor", float) or gguf.get(f"{arch}.rope.scale_linear", float) or 1.0
    kind = gguf.get(f"{scaling}.type", str, "none" if factor == 1.0 else "linear")
    original = gguf.get(f"{scaling}.original_context_length", int)
    if (found := gguf.get(f"{scaling}.attn_factor", float, 1.0)) != 1.0:
        raise ModelError(f"{gguf.path}: metadata {arch}.rope.scaling.attn_factor is {found:g}; expected 1.")
    if ROPE_FACTORS in gguf.tensors and bool((gguf.values(ROPE_FACTORS) != 1.0).any()):
        # llama.cpp applies divisors and factor together; Hugging Face has no scaling that does.
        if kind != "none" and factor != 1.0:
            raise ModelError(
                f"{gguf.path}: metadata {arch}.rope.scaling is {kind!r} with factor {factor:g} beside tensor "
                f"{ROPE_FACTORS}; expected none, or factor 1."
            )
        return _llama3_scaling(gguf, arch, original or 8192)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        limits = {name: gguf.get(f"{scaling}.yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **given}
    raise ModelError(
        f"{gguf.path}: metadata {arch}.rope.scaling.type is {kind!r} with original context {original}; "
        "expected none, linear, or yarn with an original context."
    )


def _llama3_scaling(gguf: GGUFFile, arch: str, original: int) -> dict[str, Any]:
    """The llama3 setting that gives the divisors in rope_freqs.weight. The file has only the divisors: this tries the
    setting that Llama 3.1 and later were released with, and compares its divisors with those in the file."""
    divisors = gguf.values(ROPE_FACTORS)  # [head_dim // 2]
    factor = float(divisors.max())
    low, high = 1.0, 4.0
    head_dim = 2 * divisors.size
    theta = gguf.get(f"{arch}.rope.freq_base", float, 10000.0) or 10000.0
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # 0: slow, divided by factor; 1: untouched
    if not np.allclose(1 / ((1 - blend) / factor + blend), divisors, rtol=1e-3):
        raise ModelError(
            f"{gguf.path}: tensor {ROPE_FACTORS} is not llama3 scaling by {factor:g} from {original} positions, "
            f"the only kind supported; found {divisors.tolist()}."
        )
    limits = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **limits}
