"""Owns SmolLM3 (huggingface.co/blog/smollm3): Llama whose every fourth layer does not rotate queries and keys.
Never computes: `engine.models.decoder` does."""

from __future__ import annotations

from dataclasses import replace

from engine.models.description import ModelConfig
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import FULL, SLIDING, expect_silu, read_decoder, windows_by_kind
from engine.models.rope import read_rope
from engine.models.values import Fields, integer, sequence


def _smollm3(raw: Fields) -> ModelConfig:
    expect_silu(raw)
    rope = read_rope(raw, integer(raw, "max_position_embeddings"), theta=2e6)
    rotated = _rotated(raw)
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    kinds = [SLIDING if window is not None and not turns else FULL for turns in rotated]
    biased = bool(raw.get("attention_bias", False))
    config = read_decoder(
        raw,
        tied=True,
        rope=rope,
        ropes=[rope if turns else None for turns in rotated],
        windows=windows_by_kind(raw, kinds, window),
    )
    return replace(config, qkv_bias=biased, output_bias=biased, mlp_bias=bool(raw.get("mlp_bias", False)))


def _rotated(raw: Fields) -> list[bool]:
    """Return whether each layer rotates. Despite its name, `no_rope_layers` has a 1 for layers that rotate."""
    num_layers, interval = integer(raw, "num_hidden_layers"), integer(raw, "no_rope_layer_interval", 4)
    listed = sequence(raw, "no_rope_layers") or [(number + 1) % interval for number in range(num_layers)]
    if len(listed) < num_layers:
        raise ValueError(f"no_rope_layers has {len(listed)} entries, but there are {num_layers} layers.")
    return [bool(entry) for entry in listed[:num_layers]]


SMOLLM3 = ModelFamily("SmolLM3ForCausalLM", _smollm3, LLAMA_NAMES)
