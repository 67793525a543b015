"""Owns rotary position embedding: a checkpoint's settings, and the frequencies that follow from them.
Never depends on a request's length: for chunking and the prefix cache, a key must depend only on its position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.models.values import integer, number, numbers, section

_MOST_POSITIONS = 2**31 - 1
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A checkpoint's rotary embedding. Fields that its `rope_type` does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int
    """Longest position in training, before `factor` extends it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor of cos and sin (YaRN, LongRoPE), so that scores are multiplied by its square."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """Factors of each pair's wavelength: `short_factors` within the original context, `long_factors` beyond it
    (LongRoPE)."""
    rotated: float = 1.0
    """Share of a head that is rotated, from its beginning; the rest is left unchanged."""

    def rotated_size(self, head_dim: int) -> int:
        return int(head_dim * self.rotated)

    def check(self, head_dim: int) -> None:
        """Raise ValueError if the fields do not fit heads of this size."""
        if self.rotated > 1:
            raise ValueError(f"partial_rotary_factor is {self.rotated:g}: expected at most 1.")
        size = self.rotated_size(head_dim)
        if size % 2 or not size:
            raise ValueError(f"partial_rotary_factor {self.rotated:g} of {head_dim} is {size}: expected an even size.")
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if self.rope_type == "longrope" and len(factors) != size // 2:
                raise ValueError(f"{name} has {len(factors)} entries: expected {size // 2}, one for each rotated pair.")
        if not self._is_finite(head_dim):
            raise ValueError(
                f"RoPE type {self.rope_type!r} has no finite frequencies with rope_theta {self.theta:g}, factor "
                f"{self.factor:g}, beta_fast {self.beta_fast:g}, beta_slow {self.beta_slow:g}, low_freq_factor "
                f"{self.low_freq_factor:g}, high_freq_factor {self.high_freq_factor:g}, attention_factor "
                f"{self.attention_factor:g}."
            )

    def _is_finite(self, head_dim: int) -> bool:
        try:
            found = inverse_frequencies(self, head_dim, self.original_max_position)
        except (ArithmeticError, ValueError):  # a logarithm or a quotient of what no checkpoint has
            return False
        return math.isfinite(self.attention_factor) and bool(found.isfinite().all())

    def default_length(self, max_position_embeddings: int) -> int:
        """Number of positions served unless the config asks for more. Extending `dynamic` and `longrope` costs quality
        at short lengths, so it is not the default."""
        if self.rope_type == "dynamic":
            return max_position_embeddings
        if self.rope_type == "longrope":
            return min(self.original_max_position, max_position_embeddings)
        return self.longest_position(max_position_embeddings)

    def longest_position(self, max_position_embeddings: int) -> int:
        """Number of positions that the checkpoint can serve. YaRN, linear and dynamic scaling reach beyond its own
        limit."""
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position * self.factor))
        return max_position_embeddings


def read_rope(
    config: Mapping[str, Any], max_position_embeddings: int, *, theta: float = 10000.0, partial: bool = False
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before) of a config.json.

    theta: used if the config leaves it out. partial: whether heads may be rotated partially.

    Raises:
        ValueError: the type is not one of ROPE_TYPES, a field is missing, or a field asks for something unsupported.
    """
    spec: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    if "partial_rotary_factor" in config:
        spec["partial_rotary_factor"] = config["partial_rotary_factor"]
    spec.update(section(config, "rope_scaling") or section(config, "rope_parameters"))
    rope_type = spec.get("rope_type", spec.get("type", "default"))
    _refuse_unknown(rope_type, spec, partial)
    original = max_position_embeddings
    if rope_type in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"  # transformers prefers the value outside the RoPE parameters
        original = integer(spec, key, max_position_embeddings) if config.get(key) is None else integer(config, key)
    factor = number(spec, "factor", max_position_embeddings / original if rope_type in ("yarn", "longrope") else 1.0)
    most = max(1.0, _MOST_POSITIONS / max(original, max_position_embeddings))
    if not 1 / most <= factor <= most:
        raise ValueError(
            f"factor is {factor:g}: expected at most {most:g}, so that there are at most {_MOST_POSITIONS} positions."
            if factor > 1
            else f"factor is {factor:g}: expected at least {1 / most:g}."
        )
    return RopeConfig(
        rope_type=rope_type,
        theta=number(spec, "rope_theta", theta),
        factor=factor,
        original_max_position=original,
        low_freq_factor=number(spec, "low_freq_factor", 1.0),
        high_freq_factor=number(spec, "high_freq_factor", 1.0),
        beta_fast=number(spec, "beta_fast", 32.0),
        beta_slow=number(spec, "beta_slow", 1.0),
        truncate=bool(spec.get("truncate", True)),
        attention_factor=_attention_factor(rope_type, spec, factor, original),
        short_factors=numbers(spec, "short_factor") if rope_type == "longrope" else (),
        long_factors=numbers(spec, "long_factor") if rope_type == "longrope" else (),
        rotated=number(spec, "partial_rotary_factor", 1.0),
    )


_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def _refuse_unknown(rope_type: Any, spec: Mapping[str, Any], partial: bool) -> None:
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"RoPE type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    nested = [key for key, value in spec.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"RoPE parameters per layer type ({', '.join(nested)}) are not supported, only one for all.")
    if spec.get("mrope_section"):
        raise ValueError("mrope_section (multimodal RoPE) is not supported; supported is one position per token.")
    if spec.get("partial_rotary_factor", 1.0) not in (None, 1.0) and not partial:
        raise ValueError(f"partial_rotary_factor {spec['partial_rotary_factor']} is not supported; supported is 1.0.")
    missing = [key for key in _REQUIRED[rope_type] if spec.get(key) is None]
    if missing:
        raise ValueError(f"RoPE type {rope_type!r} needs {', '.join(missing)}, which the checkpoint does not give.")


def _attention_factor(rope_type: str, spec: Mapping[str, Any], factor: float, original: int) -> float:
    """Attention temperature of YaRN (arXiv 2309.00071, section 3.4), with the mscale pair that DeepSeek added, and of
    LongRoPE as in Phi-3 (arXiv 2402.13753)."""
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if spec.get("attention_factor") is not None:
        return number(spec, "attention_factor")
    if rope_type == "longrope":
        if original == 1:
            raise ValueError("original_max_position_embeddings is 1: expected more for RoPE type 'longrope'.")
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if spec.get("mscale") and spec.get("mscale_all_dim"):
        return temperature(number(spec, "mscale")) / temperature(number(spec, "mscale_all_dim"))
    return temperature(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """Return each pair's radians per position, 0 for pairs that are not rotated. # [head_dim / 2] float32

    `dynamic` (NTK) scaling derives the base from the current length, so a cached key would depend on when it was
    computed. Here the base is computed once, for the longest length served, max(max_model_len, original): it is the
    same at every position and for every request, and equals transformers' at that length. LongRoPE's factors are also
    chosen once.
    """
    size = rope.rotated_size(head_dim)
    found = _rotated_frequencies(rope, size, max_model_len)
    return torch.nn.functional.pad(found, (0, (head_dim - size) // 2)) if size < head_dim else found


def rotation_factors(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the factor of each pair's cos and sin, 1 for pairs that are not rotated. # [head_dim / 2]"""
    factors = torch.ones(head_dim // 2)
    factors[: rope.rotated_size(head_dim) // 2] = rope.attention_factor
    return factors


def pairs_side_by_side(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the order of a head's elements that makes all pairs (i, i + head_dim / 2). # [head_dim]

    If half of a head of 8 is rotated, checkpoints have the pairs (0, 2) and (1, 3), and leave 4 to 7 as they are. The
    order is then 0, 1, 4, 5, 2, 3, 6, 7.
    """
    half = rope.rotated_size(head_dim) // 2
    rest = (head_dim - 2 * half) // 2
    first, second = torch.arange(half), torch.arange(2 * half, 2 * half + rest)
    return torch.cat((first, second, first + half, second + rest))


def _rotated_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """Return the inverse frequencies of a head's rotated part, of size `head_dim`. # [head_dim / 2] float32"""
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
    if rope.rope_type == "longrope":
        factors = rope.long_factors if max_model_len > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors) * base**exponents)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, and blend those between."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 1: keep, 0: stretch
    return blend * plain + (1.0 - blend) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """NTK by parts: keep pairs that turn often within the original context, stretch slow ones, with a ramp between."""

    def pair_that_turns(times: float) -> float:
        angle = math.log(rope.original_max_position / (times * 2 * math.pi))
        return head_dim * angle / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # a ramp of zero width would divide by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain * (1.0 - stretched) + plain / rope.factor * stretched
