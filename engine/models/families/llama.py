"""Owns Llama (arXiv 2302.13971, 2407.21783): the block that the other families vary.
Never computes: `engine.models.decoder` does."""

from __future__ import annotations

from dataclasses import replace

from engine.models.description import ModelConfig
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import expect_silu, read_decoder
from engine.models.values import Fields


def _llama(raw: Fields) -> ModelConfig:
    expect_silu(raw)
    biased = bool(raw.get("attention_bias", False))
    return replace(read_decoder(raw), qkv_bias=biased, output_bias=biased, mlp_bias=bool(raw.get("mlp_bias", False)))


LLAMA = ModelFamily("LlamaForCausalLM", _llama, LLAMA_NAMES)
