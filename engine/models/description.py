"""Owns the description of a decoder: its shapes, its switches, and what each of its layers does.
Never reads a file: families make it of a config.json, and everything else only looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.quantization import Quantization
from engine.models.rope import RopeConfig
from engine.models.vision_config import VisionConfig
from kernels.forward import SILU, LinearHeads, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of a layer's MLP."""

    count: int
    intermediate_size: int
    routing: Routing
    shared_size: int = 0
    """Intermediate size of an MLP that every token passes besides, times a gate of its own; 0: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """The gated delta rule (arXiv 2412.06464) in the place of a layer's attention: a state of one size, and no KV."""

    heads: LinearHeads
    kernel: int
    """Tokens that the convolution before it sees, its own included."""
    stacked_by_head: bool
    """The checkpoint has one matrix for queries, keys, values and gates, ordered by key head, and one for the rest."""

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return self.heads.channels

    @property
    def projected_size(self) -> int:
        """Of a token's queries, keys and values; gates of the output; write strengths and decays."""
        return self.heads.channels + self.heads.value_size + 2 * self.heads.num_value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Where one layer differs from its neighbours."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated (NoPE, arXiv 2305.19466)."""
    window: int | None = None
    """How many tokens a query sees, its own included; None: all."""
    experts: Experts | None = None
    """None: one dense MLP."""
    linear: LinearAttention | None = None
    """None: attention over keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder. Defaults are those of the block that most families share."""

    architecture: str = ""
    """As config.json spells it; given by whoever looked it up."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of dense MLPs."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_gate: bool = False
    """What attention gives is multiplied by a sigmoid that is projected beside the queries, and stored with them."""
    qk_norm: bool = False
    """Queries and keys pass an RMS norm over head_dim before they are rotated."""
    post_norms: bool = False
    """What attention and MLP give passes an RMS norm before it is added to the residual stream."""
    norm_offset: float = 0.0
    """Added to the weights of norms as checkpoints store them."""
    activation: str = SILU
    """Of the gate: SILU or GELU of kernels.forward."""
    embedding_scale: float = 1.0
    attention_scale: float
    """Of the scores before the softmax."""
    rope: RopeConfig
    """Of the layers that see all tokens: it says how far positions reach."""
    layers: tuple[LayerConfig, ...]
    vision: VisionConfig | None = None
    """None: the model takes text alone."""
    quantization: Quantization | None = None
    """How the checkpoint packs matrices; None: it has them as they are. Given by whoever read its config.json."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers that have keys and values."""
        return sum(layer.linear is None for layer in self.layers)

    @property
    def linear_layers(self) -> tuple[LinearAttention, ...]:
        """Those that have a recurrent state, in order."""
        return tuple(layer.linear for layer in self.layers if layer.linear is not None)

    @property
    def needs_linear_attention_pass(self) -> bool:
        """Whether it has parts that are of kernels.forward.LinearAttentionPass."""
        shared = any(layer.experts is not None and layer.experts.shared_size for layer in self.layers)
        return bool(self.linear_layers) or self.attention_gate or shared

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Intermediate sizes of its experts, if any layer has them."""
        return tuple({layer.experts.intermediate_size: None for layer in self.layers if layer.experts})

    @property
    def multiplied_intermediate_size(self) -> int:
        """As wide as the MLPs that one token passes, in the last layer."""
        experts = self.layers[-1].experts
        if experts is None:
            return self.intermediate_size
        return experts.intermediate_size * experts.routing.per_token + experts.shared_size
