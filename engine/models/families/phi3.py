"""Owns Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): stacked matrices, LongRoPE, partially rotated heads.
Never computes: `engine.models.decoder` does."""

from __future__ import annotations

from typing import Any

from engine.models.description import ModelConfig
from engine.models.family import ATTENTION_NAMES, ModelFamily
from engine.models.fields import expect_silu, one_window, read_decoder
from engine.models.rope import read_rope
from engine.models.values import Fields, integer, section

NAMES = {name: place for name, place in ATTENTION_NAMES.items() if place not in ("q", "k", "v", "q_norm", "k_norm")} | {
    "model.layers.{layer}.self_attn.qkv_proj": "qkv",
    "model.layers.{layer}.mlp.gate_up_proj": "gate_up",
    "model.layers.{layer}.mlp.down_proj": "down",
}


def _phi3(raw: Fields) -> ModelConfig:
    expect_silu(raw)
    rope = read_rope(_with_current_names(raw), integer(raw, "max_position_embeddings"), partial=True)
    return read_decoder(raw, eps=1e-5, rope=rope, windows=one_window(raw, raw.get("sliding_window")))


def _with_current_names(raw: Fields) -> dict[str, Any]:
    """Return the fields with LongRoPE's current name. The first checkpoints called it `su` or `yarn`."""
    fields = dict(raw)
    for key in ("rope_scaling", "rope_parameters"):
        spec = dict(section(raw, key))
        if spec.get("rope_type", spec.get("type")) in ("su", "yarn"):
            fields[key] = spec | {"rope_type": "longrope"}
    return fields


PHI3 = ModelFamily("Phi3ForCausalLM", _phi3, NAMES)
