"""Owns what a model's definition is written in: the operations of a forward pass, on whatever a backend computes with.
Never computes: `kernels.eager` runs operations as they come, `kernels.cpu.native` records them and runs the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Array = Any
"""What a backend's operations take and give: a Tensor, or a recorder's name for one."""

SILU, GELU = "silu", "gelu_tanh"
"""Activations of a gate; GELU is its approximation by tanh."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Any
    """[outputs, inputs], or what a backend has made of it."""
    bias: Any = None
    """[outputs]"""
    scales: Any = None
    """[outputs] float32: of a weight of int8, what each output is multiplied by; the native kernels read these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How the outputs of the stacked query, key and value projection divide into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHeads:
    """Of linear attention: value head h has the queries and keys of head h // (num_value_heads / num_key_heads)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Of one head's queries and keys."""
    value_dim: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of [queries | keys | values]."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture of experts chooses among them; see kernels.reference.route."""

    per_token: int
    renormalize: bool
    """The shares of a token's experts sum to one, instead of to what the softmax gave these."""


class ForwardPass(Protocol):
    """One pass over a step's tokens. Shapes are those of `kernels.reference`; arrays have [num_tokens, ...]."""

    def embed(self, table: Tensor, scale: float = 1.0) -> Array:
        """Rows of `table` [vocab, hidden] for the step's token ids, times `scale`. # [num_tokens, hidden]"""

    def rotations(self, inverse_frequencies: Tensor, factors: Tensor | float) -> Array:
        """cos and sin of the angles at the step's positions, times `factors`: one for all, or [head_dim / 2]."""

    def add_rms_norm(self, x: Array, residual: Array | None, weight: Tensor, eps: float) -> tuple[Array, Array]:
        """(rms_norm(x + residual), x + residual in float32); None: there is no residual yet."""

    def linear(self, x: Array, linear: Linear) -> Array:
        """# [num_tokens, outputs]"""

    def gated_linear(self, x: Array, linear: Linear, activation: str = SILU) -> Array:
        """activation(gate) * up of [gate | up] = linear(x). # [num_tokens, outputs / 2]"""

    def experts(self, x: Array, router: Tensor, gate_up: Linear, down: Linear, routing: Routing) -> Array:
        """The sum of what a token's experts give, each times its share. # [num_tokens, hidden]

        router: [experts, hidden] float32; the weights of gate_up and down: [experts, outputs, inputs], no biases.
        """

    def rotate_and_cache(
        self,
        qkv: Array,
        rotations: Array,
        heads: HeadShape,
        cache: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Array:
        """Normalise queries and keys by head if there are `norms`, rotate them, and write keys and values to the cache.
        Returns the queries. # [num_tokens, num_heads * head_dim]"""

    def attention(
        self, q: Array, heads: HeadShape, cache: tuple[Tensor, Tensor], scale: float, window: int | None = None
    ) -> Array:
        """`window`: how many tokens a query sees, its own included; None: all. # [num_tokens, num_heads * head_dim]"""


class LinearAttentionPass(Protocol):
    """What a pass needs besides for layers of linear attention, and for the gates of the models that have them.

    A state belongs to a request, and lies where the step's rows say; it is advanced in place.
    """

    def split(self, x: Array, sizes: Sequence[int]) -> Sequence[Array]:
        """Parts of [num_tokens, sum(sizes)], side by side. # each [num_tokens, size]"""

    def sigmoid_gate(self, x: Array, gate: Array, other: Array | None = None) -> Array:
        """x * sigmoid(gate), plus `other`. gate: as x, or [num_tokens, 1]. # as x"""

    def causal_conv(self, x: Array, weight: Tensor, state: Tensor) -> Array:
        """silu(convolution over each channel's last tokens); see kernels.reference.causal_conv. # as x

        weight: [channels, kernel]; state: [slots, kernel - 1, channels] in the type of x.
        """

    def delta_rule(
        self, qkv: Array, strength: Array, step: Array, rates: tuple[Tensor, Tensor], heads: LinearHeads, state: Tensor
    ) -> Array:
        """The gated delta rule; see kernels.reference.delta_rule. # [num_tokens, value_size]

        rates: see kernels.reference.log_decay; state: [slots, value heads, key_dim, value_dim] float32.
        """

    def gated_rms_norm(self, x: Array, gate: Array, weight: Tensor, eps: float) -> Array:
        """rms_norm(x) * silu(gate) by heads of the weight's size. # as x"""
