"""Owns Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388): biases on q, k and v; then norms on q and k instead.
Never computes: `engine.models.decoder` does."""

from __future__ import annotations

from dataclasses import replace

from engine.models.description import ModelConfig
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import FULL, SLIDING, Windows, expect_silu, read_decoder, windows_by_kind
from engine.models.values import Fields, integer


def _qwen2(raw: Fields) -> ModelConfig:
    expect_silu(raw)
    return replace(read_decoder(raw, windows=_windows(raw)), qkv_bias=True)


def _qwen3(raw: Fields) -> ModelConfig:
    expect_silu(raw)
    biased = bool(raw.get("attention_bias", False))
    config = read_decoder(raw, head_dim=128, windows=_windows(raw))
    return replace(config, qkv_bias=biased, output_bias=biased, qk_norm=True)


def _windows(raw: Fields) -> Windows:
    """Return the layers' windows. Most configs have a window that is switched off. If it is on, it applies from layer
    `max_window_layers` on."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    num_layers = integer(raw, "num_hidden_layers")
    first = num_layers if window is None else raw.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(f"max_window_layers is {first!r}: expected a number of layers, 0 or more.")
    kinds = [FULL if number < first else SLIDING for number in range(num_layers)]
    return windows_by_kind(raw, kinds, window)


QWEN2 = ModelFamily("Qwen2ForCausalLM", _qwen2, LLAMA_NAMES)
QWEN3 = ModelFamily("Qwen3ForCausalLM", _qwen3, LLAMA_NAMES)
