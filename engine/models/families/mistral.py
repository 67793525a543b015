"""Owns Mistral (arXiv 2310.06825): Llama with sliding-window attention, if the checkpoint has a window.
Never computes: `engine.models.decoder` does."""

from __future__ import annotations

from engine.models.description import ModelConfig
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import expect_silu, one_window, read_decoder
from engine.models.values import Fields


def _mistral(raw: Fields) -> ModelConfig:
    expect_silu(raw)
    # The first checkpoints had 4096; later ones say null.
    return read_decoder(raw, windows=one_window(raw, raw.get("sliding_window", 4096)))


MISTRAL = ModelFamily("MistralForCausalLM", _mistral, LLAMA_NAMES)
