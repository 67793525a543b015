"""Owns Qwen's hybrids: three of four layers use the gated delta rule (arXiv 2412.06464), the fourth uses attention.
Never computes, and never reads vision towers or layers that predict tokens further ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.models.description import Experts, LayerConfig, LinearAttention, ModelConfig
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import (
    FULL,
    LINEAR,
    expect_kinds,
    expect_silu,
    read_decoder,
    read_experts,
    sparse_layers,
)
from engine.models.rope import RopeConfig, read_rope
from engine.models.values import Fields, integer
from kernels.forward import LinearHeads, Routing

_LINEAR_NAMES = {
    "model.layers.{layer}.linear_attn.conv1d": "linear_conv",
    "model.layers.{layer}.linear_attn.A_log": "linear_rate",
    "model.layers.{layer}.linear_attn.dt_bias": "linear_rate_bias",
    "model.layers.{layer}.linear_attn.norm": "linear_norm",
    "model.layers.{layer}.linear_attn.out_proj": "linear_output",
}
_EXPERT_NAMES = {
    "model.layers.{layer}.mlp.gate": "router",
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj": "gate",
    "model.layers.{layer}.mlp.experts.{expert}.up_proj": "up",
    "model.layers.{layer}.mlp.experts.{expert}.down_proj": "down",
    "model.layers.{layer}.mlp.shared_expert.gate_proj": "shared_gate",
    "model.layers.{layer}.mlp.shared_expert.up_proj": "shared_up",
    "model.layers.{layer}.mlp.shared_expert.down_proj": "shared_down",
    "model.layers.{layer}.mlp.shared_expert_gate": "shared_share",
}
QWEN3_NEXT_NAMES = (
    LLAMA_NAMES
    | _LINEAR_NAMES
    | _EXPERT_NAMES
    | {
        "model.layers.{layer}.linear_attn.in_proj_qkvz": "linear_qkvz",
        "model.layers.{layer}.linear_attn.in_proj_ba": "linear_ba",
    }
)
QWEN3_5_NAMES = (
    LLAMA_NAMES
    | _LINEAR_NAMES
    | {
        "model.layers.{layer}.linear_attn.in_proj_qkv": "linear_qkv",
        "model.layers.{layer}.linear_attn.in_proj_z": "linear_z",
        "model.layers.{layer}.linear_attn.in_proj_b": "linear_b",
        "model.layers.{layer}.linear_attn.in_proj_a": "linear_a",
    }
)
_UNUSED = ("mtp.",)  # layers that predict tokens further ahead
_NESTED = "model.language_model."  # the text decoder in a vision-language model, or extracted from one by transformers
_EXTRACTED = {_NESTED: "model."}
_VISION = "model.visual."
_STACKED = {
    "model.layers.{layer}.mlp.experts.gate_up_proj": "gate_up",
    "model.layers.{layer}.mlp.experts.down_proj": "down",
}


def _qwen3_next(raw: Fields) -> ModelConfig:
    config = _hybrid(raw, stacked_by_head=True)
    experts = _experts(raw, count=512, per_token=10, renormalize=bool(raw.get("norm_topk_prob", True)))
    return replace(config, layers=sparse_layers(raw, config.layers, experts))


def _qwen3_5(raw: Fields) -> ModelConfig:
    return _hybrid(raw, stacked_by_head=False)


def _qwen3_5_moe(raw: Fields) -> ModelConfig:
    """Read a config in which every layer has experts, so that it gives no size of a dense MLP."""
    experts = _experts(raw, count=256, per_token=8, renormalize=True)
    config = _hybrid({**raw, "intermediate_size": experts.intermediate_size}, stacked_by_head=False)
    return replace(config, layers=tuple(replace(layer, experts=experts) for layer in config.layers))


def _experts(raw: Fields, *, count: int, per_token: int, renormalize: bool) -> Experts:
    """count, per_token: used if the config leaves them out."""
    return read_experts(
        count=integer(raw, "num_experts", count),
        intermediate_size=integer(raw, "moe_intermediate_size", 512),
        routing=Routing(integer(raw, "num_experts_per_tok", per_token), renormalize=renormalize),
        shared_size=integer(raw, "shared_expert_intermediate_size", 512),
    )


def _hybrid(raw: Fields, *, stacked_by_head: bool) -> ModelConfig:
    expect_silu(raw)
    kinds, biased = _kinds(raw), bool(raw.get("attention_bias", False))
    config = read_decoder(raw, head_dim=256, rope=_rope(raw), windows=[None] * len(kinds))
    linear = _linear_attention(raw, stacked_by_head)
    layers = (LayerConfig(rope=config.rope, linear=linear if kind == LINEAR else None) for kind in kinds)
    return replace(
        config,
        qkv_bias=biased,
        output_bias=biased,
        attention_gate=True,
        qk_norm=True,
        norm_offset=1.0,
        layers=tuple(layers),
    )


def _kinds(raw: Fields) -> list[str]:
    """Return the kind of each layer."""
    expect_kinds(raw, LINEAR, FULL)
    num_layers, interval = integer(raw, "num_hidden_layers"), integer(raw, "full_attention_interval", 4)
    found = raw.get("layer_types") or [
        FULL if number % interval == 0 else LINEAR for number in range(1, num_layers + 1)
    ]
    if len(found) != num_layers:
        raise ValueError(f"layer_types names {len(found)} layers, but there are {num_layers}.")
    if FULL not in found:
        raise ValueError(f"layer_types has no {FULL}: at least one layer is expected to have keys and values.")
    return list(found)


def _rope(raw: Fields) -> RopeConfig:
    """Read plain RoPE. Multimodal RoPE equals it for text, whose tokens have the same position in every section."""
    fields = {"partial_rotary_factor": 0.25, **raw}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(spec := raw.get(key), dict):
            fields[key] = {name: value for name, value in spec.items() if not name.startswith("mrope_")}
    return read_rope(fields, integer(raw, "max_position_embeddings"), partial=True)


def _linear_attention(raw: Fields, stacked_by_head: bool) -> LinearAttention:
    heads = LinearHeads(
        num_key_heads=integer(raw, "linear_num_key_heads", 16),
        num_value_heads=integer(raw, "linear_num_value_heads", 32),
        key_dim=integer(raw, "linear_key_head_dim", 128),
        value_dim=integer(raw, "linear_value_head_dim", 128),
    )
    if heads.num_value_heads % heads.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads is {heads.num_value_heads}, and linear_num_key_heads {heads.num_key_heads}: "
            "expected a multiple of the key heads."
        )
    return LinearAttention(
        heads=heads, kernel=integer(raw, "linear_conv_kernel_dim", 4), stacked_by_head=stacked_by_head
    )


def _of_text(family: ModelFamily, architecture: str) -> ModelFamily:
    """Return the family of the same decoder in a vision-language model: its fields are under `text_config`, and its
    tensors under a prefix. The vision tower is left out, so the model takes only text."""

    def describe(raw: Fields) -> ModelConfig:
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(f"text_config is {text!r}: expected an object, the text decoder's fields.")
        # Both configs have tie_word_embeddings; transformers uses this one.
        return family.describe({**text, "tie_word_embeddings": raw.get("tie_word_embeddings", False)})

    def nested(names: Mapping[str, str]) -> dict[str, str]:
        return {name.replace("model.", _NESTED, 1): place for name, place in names.items()}

    return ModelFamily(
        architecture, describe, nested(family.names), (*family.unused, _VISION), stacked=nested(family.stacked)
    )


QWEN3_NEXT = ModelFamily("Qwen3NextForCausalLM", _qwen3_next, QWEN3_NEXT_NAMES, _UNUSED)
QWEN3_5 = ModelFamily("Qwen3_5ForCausalLM", _qwen3_5, QWEN3_5_NAMES, _UNUSED, _EXTRACTED)
QWEN3_5_MOE = ModelFamily(
    "Qwen3_5MoeForCausalLM", _qwen3_5_moe, QWEN3_5_NAMES | _EXPERT_NAMES, _UNUSED, _EXTRACTED, _STACKED
)
QWEN3_5_VL = _of_text(QWEN3_5, "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE_VL = _of_text(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration")
