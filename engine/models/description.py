"""Owns the description of a decoder: its shapes, its switches, and what each layer does.
Never reads a file: families make the description from a config.json, and all other code only reads it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.quantization import Quantization
from engine.models.rope import RopeConfig
from engine.models.vision_config import VisionConfig
from kernels.forward import SILU, LinearHeads, Routing


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model that several ranks compute together is this rank's."""

    rank: int = 0
    size: int = 1
    """How many ranks there are."""


WHOLE = Shard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts instead of a layer's MLP."""

    count: int
    intermediate_size: int
    routing: Routing
    shared_size: int = 0
    """Intermediate size of the shared expert, an MLP with its own gate that every token also passes; 0: none."""
    held: range | None = None
    """The numbers of the experts that this rank has, of those that ranks with tokens of their own have between them.
    None: all."""

    @property
    def here(self) -> range:
        """The numbers of the experts whose weights this rank has."""
        return range(self.count) if self.held is None else self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """The gated delta rule (arXiv 2412.06464) instead of a layer's attention: a state of fixed size, and no KV."""

    heads: LinearHeads
    kernel: int
    """How many tokens the convolution sees, the current one included."""
    stacked_by_head: bool
    """Whether the checkpoint has one matrix for queries, keys, values and gates, ordered by key head, and one for the
    rest."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return self.heads.channels

    @property
    def projected_size(self) -> int:
        """Size of a token's projections: queries, keys and values; gates of the output; write strengths and decays."""
        return self.heads.channels + self.heads.value_size + 2 * self.heads.num_value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The properties in which layers of a model can differ."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated (NoPE, arXiv 2305.19466)."""
    window: int | None = None
    """How many tokens a query sees, the current one included; None: all."""
    experts: Experts | None = None
    """None: one dense MLP."""
    linear: LinearAttention | None = None
    """None: attention over keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder. The defaults suit the block that most families share."""

    architecture: str = ""
    """The name in config.json. Set by engine.models.config."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """The size in dense MLPs."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    dense_positions: int | None = None
    """How many positions attention as it is computed here serves; beyond them the checkpoint wants dual chunk attention
    (arXiv 2402.17463). None: as many as RoPE. Set by engine.models.config."""
    tie_word_embeddings: bool
    headless: bool = False
    """Whether the checkpoint has no LM head, so that the model makes embeddings alone. Set by engine.models.config."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_gate: bool = False
    """Whether attention's output is multiplied by a sigmoid gate, which is projected and stored together with the
    queries."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMS norm over head_dim before they are rotated."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP pass an RMS norm before they are added to the residual stream."""
    norm_offset: float = 0.0
    """Added to the norms' weights that checkpoints store."""
    activation: str = SILU
    """Activation of the MLP's gate: SILU or GELU of kernels.forward."""
    embedding_scale: float = 1.0
    attention_scale: float
    """Factor of the scores before the softmax."""
    rope: RopeConfig
    """RoPE of the layers that see all tokens. It determines how far positions reach."""
    layers: tuple[LayerConfig, ...]
    vision: VisionConfig | None = None
    """None: the model takes text alone."""
    quantization: Quantization | None = None
    """How the checkpoint packs matrices; None if it does not. Set by engine.models.config."""
    shard: Shard = WHOLE
    """Which part of the model the numbers of heads and the intermediate sizes are of; see engine.models.shards."""
    whole: ModelConfig | None = None
    """The model that this is a part of, as config.json describes it. None: this is all of it."""

    @property
    def longest_position(self) -> int:
        """Number of positions that can be served."""
        longest = self.rope.longest_position(self.max_position_embeddings)
        return longest if self.dense_positions is None else min(longest, self.dense_positions)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers that have keys and values."""
        return sum(layer.linear is None for layer in self.layers)

    @property
    def linear_layers(self) -> tuple[LinearAttention, ...]:
        """The linear attention of the layers that have it, in order. Each has a recurrent state."""
        return tuple(layer.linear for layer in self.layers if layer.linear is not None)

    @property
    def needs_linear_attention_pass(self) -> bool:
        """Whether the model has parts that only kernels.forward.LinearAttentionPass computes."""
        shared = any(layer.experts is not None and layer.experts.shared_size for layer in self.layers)
        return bool(self.linear_layers) or self.attention_gate or shared

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Distinct intermediate sizes of the layers' experts; empty if no layer has any."""
        return tuple({layer.experts.intermediate_size: None for layer in self.layers if layer.experts})

    @property
    def hybrid_sizes(self) -> tuple[int, ...]:
        """Distinct numbers of inputs of the matrices that only hybrids have: linear attention's outputs, and shared
        experts' down projections."""
        shared = (layer.experts.shared_size for layer in self.layers if layer.experts and layer.experts.shared_size)
        return tuple(dict.fromkeys((*(linear.heads.value_size for linear in self.linear_layers), *shared)))

    @property
    def multiplied_intermediate_size(self) -> int:
        """Total intermediate size of the MLPs that one token passes, in the last layer."""
        experts = self.layers[-1].experts
        if experts is None:
            return self.intermediate_size
        return experts.intermediate_size * experts.routing.per_token + experts.shared_size
