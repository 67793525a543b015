"""Owns the description of a decoder, read from a checkpoint's own config.json.
Never guesses: a feature that would change the answer and is not computed here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_cache import ModelError
from engine.models.registry import FAMILIES, Family
from engine.models.rope import RopeConfig, read_rope


class CheckpointError(ModelError):
    """A checkpoint cannot be served as it is. The message names the file, what was found and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder (Llama, Qwen2 and Qwen3 share the block)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: expected a Hugging Face model directory.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: expected an object.")
    return value


def read_model_config(model_dir: Path) -> ModelConfig:
    """The decoder that `model_dir/config.json` describes.

    Raises:
        CheckpointError: a field is missing or of the wrong kind, or a feature is not supported; it says which are.
    """
    path = model_dir / "config.json"
    raw = read_json(path)
    try:
        return parse_model_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """As `read_model_config`, from the parsed object; raises ValueError without the file's name."""
    architecture, family = _family(raw)
    _refuse_unsupported(raw)
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    max_position_embeddings = _integer(raw, "max_position_embeddings")
    head_dim = raw.get("head_dim") or family.default_head_dim or hidden_size // num_heads
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    attention_bias = bool(raw.get("attention_bias", False))
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads} attention heads, {num_kv_heads} KV heads of size {head_dim} do not fit together: "
            "expected a multiple of the KV heads, and an even size."
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.always_qkv_bias or (family.reads_attention_bias and attention_bias),
        output_bias=family.reads_attention_bias and attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=read_rope(raw, max_position_embeddings),
    )


def _family(raw: Mapping[str, Any]) -> tuple[str, Family]:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    found = ", ".join(map(str, names)) or "none"
    raise ValueError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}.")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantization_config ({method}) is not supported; supported are unquantised weights.")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'.")
    other_layers = sorted({str(kind) for kind in raw.get("layer_types") or []} - {"full_attention"})
    if other_layers:
        raise ValueError(f"layer_types {', '.join(other_layers)} are not supported; supported is full_attention.")
    if _slides(raw):
        raise ValueError(f"sliding_window {raw['sliding_window']} is in use and not supported; full attention is.")


def _slides(raw: Mapping[str, Any]) -> bool:
    """Qwen's configs carry a window that is switched off, or that starts above the last layer."""
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", "max_window_layers" not in raw):
        return False
    return bool(raw.get("max_window_layers", 0) < raw["num_hidden_layers"])


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}: expected a positive integer.")
    return value
