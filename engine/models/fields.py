"""Owns what all families read from a config.json in the same way: sizes, windows, and refusals of unsupported fields.
Never knows a family: each family says how it differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.models.description import Experts, LayerConfig, ModelConfig
from engine.models.rope import RopeConfig, read_rope
from engine.models.values import Fields, integer, number, sequence
from kernels.forward import Routing

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Windows = Sequence[int | None]
"""The window of each layer; see LayerConfig."""


def read_decoder(
    raw: Fields,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    rope: RopeConfig | None = None,
    ropes: Sequence[RopeConfig | None] | None = None,
    windows: Windows | None = None,
) -> ModelConfig:
    """Read the pre-norm decoder of Llama without biases, from which families start.

    head_dim, tied, eps: used if the config leaves them out; head_dim None means hidden_size / num_attention_heads.
    rope: None means the config's own. ropes, windows: one for each layer; None means `rope` in each, and no windows.

    Raises:
        ValueError: a field is missing or of the wrong kind, sizes do not fit together, or a window was not expected.
    """
    if windows is None:
        refuse_windows(raw)
    hidden_size, num_heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    num_kv_heads = integer(raw, "num_key_value_heads", num_heads)
    head_dim = integer(raw, "head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads} attention heads, {num_kv_heads} KV heads of size {head_dim} do not fit together: "
            "expected a multiple of the KV heads, and an even size."
        )
    num_layers, positions = integer(raw, "num_hidden_layers"), integer(raw, "max_position_embeddings")
    rope = rope or read_rope(raw, positions)
    rope.check(head_dim)
    longest = rope.longest_position(positions)
    layers = zip(ropes or [rope] * num_layers, windows or [None] * num_layers, strict=True)
    return ModelConfig(
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", eps),
        max_position_embeddings=positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", tied)),
        attention_scale=head_dim**-0.5,
        rope=rope,
        # A window longer than any text has no effect, but would rule out the kernels for full attention.
        layers=tuple(
            LayerConfig(rope=layer_rope, window=window if window is not None and window < longest else None)
            for layer_rope, window in layers
        ),
    )


def read_experts(*, count: int, intermediate_size: int, routing: Routing, shared_size: int = 0) -> Experts:
    """Describe a mixture of experts. Raises ValueError if a token has more experts than there are."""
    if routing.per_token > count:
        raise ValueError(f"num_experts_per_tok is {routing.per_token}, but there are {count} experts.")
    return Experts(count=count, intermediate_size=intermediate_size, routing=routing, shared_size=shared_size)


def sparse_layers(raw: Fields, layers: Sequence[LayerConfig], experts: Experts) -> tuple[LayerConfig, ...]:
    """Return the layers with `experts` in every `decoder_sparse_step`-th one, except those in `mlp_only_layers`."""
    step, dense = integer(raw, "decoder_sparse_step", 1), sequence(raw, "mlp_only_layers")
    return tuple(
        layer if number in dense or (number + 1) % step else replace(layer, experts=experts)
        for number, layer in enumerate(layers)
    )


def expect(raw: Fields, key: str, *supported: Any) -> None:
    """Raise ValueError if `key` exists and is not one of `supported`, whose first value is the default."""
    found = raw.get(key, supported[0])
    if found not in supported:
        raise ValueError(f"{key} {found!r} is not supported; supported is {supported[0]!r}.")


def expect_silu(raw: Fields) -> None:
    expect(raw, "hidden_act", "silu", "swish")


def refuse_windows(raw: Fields) -> None:
    """Refuse windows, for a family whose layers see all tokens."""
    expect_kinds(raw, FULL)
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", True):
        raise ValueError(f"sliding_window {raw['sliding_window']} is in use and not supported; full attention is.")


def expect_kinds(raw: Fields, *supported: str) -> None:
    """Raise ValueError if `layer_types` names other kinds of layers."""
    others = sorted({str(kind) for kind in sequence(raw, "layer_types")} - set(supported))
    if others:
        raise ValueError(f"layer_types {', '.join(others)} are not supported; supported is {', '.join(supported)}.")


def one_window(raw: Fields, window: int | None) -> Windows:
    """Return the windows of layers that all have the same one."""
    expect_kinds(raw, FULL if window is None else SLIDING)
    return [_checked(window)] * integer(raw, "num_hidden_layers")


def windows_by_kind(raw: Fields, kinds: Sequence[str], window: int | None) -> Windows:
    """Return the layers' windows: `window` for kind SLIDING, else None. kinds: used if there is no `layer_types`."""
    expect_kinds(raw, FULL, SLIDING)
    found = raw.get("layer_types") or kinds
    if len(found) != integer(raw, "num_hidden_layers"):
        raise ValueError(f"layer_types names {len(found)} layers, but there are {raw['num_hidden_layers']}.")
    if window is None and SLIDING in found:
        raise ValueError("layer_types has sliding_attention, but there is no sliding_window in use.")
    return [_checked(window) if kind == SLIDING else None for kind in found]


def _checked(window: Any) -> int | None:
    if window is None:
        return None
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window is {window!r}: expected a positive integer.")
    return window
