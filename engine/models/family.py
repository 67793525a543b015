"""Owns the interface of a model family: its name, how it reads config.json, and the names of its tensors.
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
"""The names in most checkpoints, without `.weight` and `.bias`."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The models that one description covers."""

    architecture: str
    """The name that config.json lists under `architectures`."""
    describe: Callable[[Mapping[str, Any]], ModelConfig]
    """Describes the model of a parsed config.json. Raises ValueError if something in it is not supported; see
    engine.models.fields."""
    names: Mapping[str, str]
    """A tensor's name in the checkpoint -> its place; engine.models.parameters lists the places.

    `{layer}` and `{expert}` stand for numbers; names with `{expert}` are only in layers with experts."""
    unused: tuple[str, ...] = ()
    """Prefixes of the checkpoint's tensors that the decoder does not use."""
    nested: Mapping[str, str] = field(default_factory=dict)
    """Prefixes in other forms of a checkpoint, such as one that was extracted from a larger model -> those in
    `names`."""
    stacked: Mapping[str, str] = field(default_factory=dict)
    """For checkpoints that store all of a layer's experts in one tensor: the tensor's name -> `gate_up` or `down`."""
