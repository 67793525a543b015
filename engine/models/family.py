"""Owns what a family of models is to the engine: its name, its reading of config.json, and the names of its tensors.
Never lists the families: `engine.models.registry` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.models.description import ModelConfig

ATTENTION_NAMES = {
    "model.embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "lm_head",
    "model.layers.{layer}.input_layernorm": "input_norm",
    "model.layers.{layer}.self_attn.q_proj": "q",
    "model.layers.{layer}.self_attn.k_proj": "k",
    "model.layers.{layer}.self_attn.v_proj": "v",
    "model.layers.{layer}.self_attn.q_norm": "q_norm",
    "model.layers.{layer}.self_attn.k_norm": "k_norm",
    "model.layers.{layer}.self_attn.o_proj": "output",
    "model.layers.{layer}.post_attention_layernorm": "mlp_norm",
}
MLP_NAMES = {
    "model.layers.{layer}.mlp.gate_proj": "gate",
    "model.layers.{layer}.mlp.up_proj": "up",
    "model.layers.{layer}.mlp.down_proj": "down",
}
LLAMA_NAMES = ATTENTION_NAMES | MLP_NAMES
"""As most checkpoints spell them, but for `.weight` and `.bias`."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models that one description covers."""

    architecture: str
    """What config.json lists under `architectures`."""
    describe: Callable[[Mapping[str, Any]], ModelConfig]
    """Of a parsed config.json. Raises ValueError where it asks for what is not computed; see engine.models.fields."""
    names: Mapping[str, str]
    """A tensor's name in the checkpoint -> its place; engine.models.parameters lists those that there are.

    `{layer}` and `{expert}` stand for numbers; a name with `{expert}` is of layers with experts."""
    unused: tuple[str, ...] = ()
    """How the names of tensors begin that checkpoints have and the decoder has no use for."""
    nested: str | None = None
    """How names begin, instead of with `model.`, in a checkpoint that was taken out of a larger model."""
    stacked: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that hold all of a layer's experts, in checkpoints that store them so -> `gate_up` or `down`."""
