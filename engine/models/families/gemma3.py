"""Owns Gemma 3's text decoder (arXiv 2503.19786): five of six layers see a window; norms before and after; GeGLU.
Never computes, and never reads the vision tower that larger checkpoints have."""

from __future__ import annotations

from dataclasses import replace

from engine.models.description import ModelConfig
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import FULL, SLIDING, expect, read_decoder, windows_by_kind
from engine.models.rope import RopeConfig, read_rope
from engine.models.values import Fields, integer, number, section
from kernels.forward import GELU

NAMES = LLAMA_NAMES | {
    "model.layers.{layer}.post_attention_layernorm": "attention_post_norm",
    "model.layers.{layer}.pre_feedforward_layernorm": "mlp_norm",
    "model.layers.{layer}.post_feedforward_layernorm": "mlp_post_norm",
}


def _gemma3(raw: Fields) -> ModelConfig:
    for key in ("hidden_activation", "hidden_act"):
        expect(raw, key, "gelu_pytorch_tanh", None)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        expect(raw, key, None)
    expect(raw, "use_bidirectional_attention", False, None)
    pattern = integer(raw, "sliding_window_pattern", 6)
    kinds = [SLIDING if (number + 1) % pattern else FULL for number in range(integer(raw, "num_hidden_layers"))]
    windows = windows_by_kind(raw, kinds, integer(raw, "sliding_window", 4096))
    everywhere, nearby = _ropes(raw)
    # With linear scaling, checkpoints give the extended limit; read_decoder expects the limit before scaling.
    scaled = everywhere.factor if everywhere.rope_type == "linear" else 1
    positions = int(integer(raw, "max_position_embeddings") / scaled)
    biased = bool(raw.get("attention_bias", False))
    config = read_decoder(
        {**raw, "max_position_embeddings": positions},
        head_dim=256,
        tied=True,
        rope=everywhere,
        ropes=[everywhere if window is None else nearby for window in windows],
        windows=windows,
    )
    return replace(
        config,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        activation=GELU,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=number(raw, "query_pre_attn_scalar", 256) ** -0.5,
    )


def _ropes(raw: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Read the RoPE of layers that see all tokens, and of those that see a window. The latter is scaled only if the
    config says so. As in transformers, older fields complete `rope_parameters`, and `rope_scaling` prevails."""
    positions = integer(raw, "max_position_embeddings")
    found = section(raw, "rope_parameters")
    if set(found) - {FULL, SLIDING}:
        raise ValueError(f"rope_parameters has {', '.join(found)}: expected {FULL} and {SLIDING}.")
    everywhere = {"rope_theta": raw.get("rope_theta"), **section(found, FULL), **section(raw, "rope_scaling")}
    nearby = {"rope_theta": raw.get("rope_local_base_freq"), **section(found, SLIDING)}
    return (
        read_rope({"rope_parameters": everywhere}, positions, theta=1e6),
        read_rope({"rope_parameters": nearby}, positions),
    )


GEMMA3 = ModelFamily("Gemma3ForCausalLM", _gemma3, NAMES)
