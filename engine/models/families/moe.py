"""Owns the mixtures of experts: Qwen3-MoE (arXiv 2505.09388) and Mixtral (arXiv 2401.04088).
Never computes: `engine.models.decoder` does."""

from __future__ import annotations

from dataclasses import replace

from engine.models.description import ModelConfig
from engine.models.family import ATTENTION_NAMES, LLAMA_NAMES, ModelFamily
from engine.models.fields import expect_silu, one_window, read_decoder, read_experts, sparse_layers
from engine.models.rope import read_rope
from engine.models.values import Fields, integer
from kernels.forward import Routing

QWEN3_MOE_NAMES = LLAMA_NAMES | {
    "model.layers.{layer}.mlp.gate": "router",
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj": "gate",
    "model.layers.{layer}.mlp.experts.{expert}.up_proj": "up",
    "model.layers.{layer}.mlp.experts.{expert}.down_proj": "down",
}
MIXTRAL_NAMES = ATTENTION_NAMES | {
    "model.layers.{layer}.block_sparse_moe.gate": "router",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1": "gate",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3": "up",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2": "down",
}


def _qwen3_moe(raw: Fields) -> ModelConfig:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer, unless `mlp_only_layers` names the layer."""
    expect_silu(raw)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    biased = bool(raw.get("attention_bias", False))
    config = read_decoder(raw, windows=one_window(raw, window))
    experts = read_experts(
        count=integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts", 128),
        intermediate_size=integer(raw, "moe_intermediate_size", 768),
        routing=Routing(integer(raw, "num_experts_per_tok", 8), renormalize=bool(raw.get("norm_topk_prob", False))),
    )
    layers = sparse_layers(raw, config.layers, experts)
    return replace(config, qkv_bias=biased, output_bias=biased, qk_norm=True, layers=layers)


def _mixtral(raw: Fields) -> ModelConfig:
    """Mistral with `num_local_experts` experts instead of each MLP."""
    expect_silu(raw)
    rope = read_rope(raw, integer(raw, "max_position_embeddings"), theta=1e6)
    config = read_decoder(raw, eps=1e-5, rope=rope, windows=one_window(raw, raw.get("sliding_window")))
    experts = read_experts(
        count=integer(raw, "num_local_experts", 8),
        intermediate_size=config.intermediate_size,
        routing=Routing(integer(raw, "num_experts_per_tok", 2), renormalize=True),
    )
    return replace(config, layers=tuple(replace(layer, experts=experts) for layer in config.layers))


QWEN3_MOE = ModelFamily("Qwen3MoeForCausalLM", _qwen3_moe, QWEN3_MOE_NAMES)
MIXTRAL = ModelFamily("MixtralForCausalLM", _mixtral, MIXTRAL_NAMES)
