"""Owns rotary position embedding: what a checkpoint asks for, and the frequencies that follow.
Never depends on the length of a request: chunking and the prefix cache need a key to be a function of its position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a checkpoint. Fields that its `rope_type` does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int
    """Longest position of the training that `factor` extends."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """cos and sin are multiplied by this (YaRN); it reaches the scores squared."""

    def longest_position(self, max_position_embeddings: int) -> int:
        """Positions that the checkpoint can serve: YaRN, linear and dynamic scaling reach beyond its own limit."""
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position * self.factor))
        return max_position_embeddings


def read_rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before) of a config.json.

    Raises:
        ValueError: the type is not one of ROPE_TYPES, or a field is missing or changes what this file computes.
    """
    spec: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    if "partial_rotary_factor" in config:
        spec["partial_rotary_factor"] = config["partial_rotary_factor"]
    spec.update(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope_type = spec.get("rope_type", spec.get("type", "default"))
    _refuse_unknown(rope_type, spec)
    original = max_position_embeddings
    if rope_type in ("llama3", "yarn"):
        key = "original_max_position_embeddings"  # transformers prefers the one outside the RoPE parameters
        original = int(config.get(key) or spec.get(key) or max_position_embeddings)
    factor = spec.get("factor")
    if factor is None:
        factor = max_position_embeddings / original if rope_type == "yarn" else 1.0
    return RopeConfig(
        rope_type=rope_type,
        theta=float(spec["rope_theta"] or 10000.0),
        factor=float(factor),
        original_max_position=original,
        low_freq_factor=float(spec.get("low_freq_factor") or 1.0),
        high_freq_factor=float(spec.get("high_freq_factor") or 1.0),
        beta_fast=float(spec.get("beta_fast") or 32.0),
        beta_slow=float(spec.get("beta_slow") or 1.0),
        truncate=bool(spec.get("truncate", True)),
        attention_factor=_yarn_attention_factor(spec, float(factor)) if rope_type == "yarn" else 1.0,
    )


_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def _refuse_unknown(rope_type: Any, spec: Mapping[str, Any]) -> None:
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"RoPE type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    nested = [key for key, value in spec.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"RoPE parameters per layer type ({', '.join(nested)}) are not supported, only one for all.")
    if spec.get("mrope_section"):
        raise ValueError("mrope_section (multimodal RoPE) is not supported; supported is one position per token.")
    if spec.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {spec['partial_rotary_factor']} is not supported; supported is 1.0.")
    missing = [key for key in _REQUIRED[rope_type] if spec.get(key) is None]
    if missing:
        raise ValueError(f"RoPE type {rope_type!r} needs {', '.join(missing)}, which the checkpoint does not give.")


def _yarn_attention_factor(spec: Mapping[str, Any], factor: float) -> float:
    """Attention temperature of YaRN (arXiv 2309.00071, section 3.4), with the mscale pair that DeepSeek added."""
    if spec.get("attention_factor") is not None:
        return float(spec["attention_factor"])

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """Radians per position of each rotated pair. # [head_dim / 2] float32

    `dynamic` (NTK) scaling defines the base by the current length, so a cached key would depend on when it was
    computed. It is resolved once, for the longest length served, max(max_model_len, original): the same at every
    position and for every request, and equal to transformers' at that length.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = rope.theta
    if rope.rope_type == "dynamic":
        stretch = max(max_model_len, rope.original_max_position) / rope.original_max_position
        base *= (rope.factor * stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    plain = 1.0 / base**exponents
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Short wavelengths stay, long ones stretch by `factor`, and those between are blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 1: keep, 0: stretch
    return blend * plain + (1.0 - blend) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """NTK by parts: pairs that turn often within the original context stay, slow ones stretch, a ramp joins them."""

    def pair_that_turns(times: float) -> float:
        angle = math.log(rope.original_max_position / (times * 2 * math.pi))
        return head_dim * angle / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain * (1.0 - stretched) + plain / rope.factor * stretched
