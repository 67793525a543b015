"""Owns the operations that a model's forward pass is written in, on whatever arrays a backend uses.
Never computes: `kernels.eager` runs operations as they come, `kernels.cpu.native` records them and runs the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Array = Any
"""What a backend's operations take and return: a Tensor, or a recorder's handle for one."""

NARROW_GROUP = 16
"""Inputs that share a scale are a multiple of this many: tensor cores add up as many products at a time."""

SILU, GELU = "silu", "gelu_tanh"
"""Activations of a gate. GELU is the tanh approximation."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Any
    """[outputs, inputs], or a backend's packed form of it. Where there are scales, the stored numbers q: int8,
    float8_e4m3fn, or uint8 with 4 bits for each, [outputs, inputs / 2], the even input in the lower bits."""
    bias: Any = None
    """[outputs]"""
    scales: Any = None
    """[outputs], or [outputs, groups] float32: a weight is (q - zero) * scale."""
    zeros: Any = None
    """[outputs, groups] int8. None: 8 for 4 bits, else 0."""
    group: int | None = None
    """How many inputs share a scale; the last group may be smaller. None: all."""
    order: Any = None
    """[inputs] int32: the column j of the stored numbers is that of input order[j]. None: j. Of experts, [experts,
    inputs]."""
    input_scale: Any = None
    """[1] float32: a backend that can rounds the activations of many rows to float8_e4m3fn in units of this scale, or,
    if it is 0, of the row's largest magnitude / 448. None: activations keep their type."""

    def of_expert(self, number: int) -> Linear:
        """Return one expert's matrix; all tensors have an axis of experts before the others."""
        parts = (self.weight, self.bias, self.scales, self.zeros)
        weight, bias, scales, zeros = (None if part is None else part[number] for part in parts)
        return Linear(weight, bias, scales, zeros, self.group, None if self.order is None else self.order[number])


@dataclass(frozen=True, slots=True)
class LowRankStack:
    """What all adapters in memory add to one Linear, by slot: y += (x a^T) b^T, for each part of the outputs.

    Parts are what a checkpoint stores as matrices of their own, such as queries, keys and values. Ranks that an adapter
    does not have are zero, and a slot without an adapter holds anything.
    """

    a: Tensor
    """[slots, parts, ranks, inputs]"""
    b: Tensor
    """[slots, outputs, ranks]: output n takes the ranks of its own part. Includes the adapter's scale."""
    firsts: tuple[int, ...]
    """Where the outputs of each part begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How the outputs of the stacked query, key and value projection divide into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHeads:
    """The heads of linear attention: value head h uses the queries and keys of head
    h // (num_value_heads / num_key_heads)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """The size of one head's queries and keys."""
    value_dim: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The width of [queries | keys | values]."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture of experts chooses among them; see kernels.reference.route."""

    per_token: int
    renormalize: bool
    """Whether the shares of a token's experts are rescaled to sum to one."""


def held_experts(count: int, rank: int, size: int) -> range:
    """Return which of `count` experts a rank holds where `size` ranks have them between them; sizes differ by one at
    most. The same as in kernels/cpu/native/experts.h."""
    return range(count * rank // size, count * (rank + 1) // size)


class ForwardPass(Protocol):
    """One pass over a step's tokens. Shapes are those of `kernels.reference`; arrays are [num_tokens, ...]."""

    def embed(self, table: Tensor, scale: float = 1.0) -> Array:
        """Rows of `table` [vocab, hidden] for the step's token ids, times `scale`. # [num_tokens, hidden]"""

    def rotations(self, inverse_frequencies: Tensor, factors: Tensor | float) -> Array:
        """cos and sin of the angles at the step's positions, times `factors`: a scalar, or [head_dim / 2]."""

    def add_rms_norm(self, x: Array, residual: Array | None, weight: Tensor, eps: float) -> tuple[Array, Array]:
        """(rms_norm(x + residual), x + residual in float32). residual None: there is none yet."""

    def linear(self, x: Array, linear: Linear) -> Array:
        """x W^T + b. # [num_tokens, outputs]"""

    def gated_linear(self, x: Array, linear: Linear, activation: str = SILU) -> Array:
        """activation(gate) * up of [gate | up] = linear(x). # [num_tokens, outputs / 2]"""

    def all_reduce(self, x: Array) -> Array:
        """Sum over the ranks that compute the model together; see kernels.collectives.group. Only where there are
        several. # as x"""

    def experts(self, x: Array, router: Tensor, gate_up: Linear, down: Linear, routing: Routing) -> Array:
        """Sum the outputs of each token's experts, weighted by their shares. # [num_tokens, hidden]

        router: [experts, hidden] float32; the weights of gate_up and down: [experts, outputs, inputs], or a backend's
        packed form of them; no biases.
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
        """Normalise queries and keys per head if `norms` is given, rotate them, and write keys and values to the cache.
        Return the queries. # [num_tokens, num_heads * head_dim]"""

    def attention(
        self, q: Array, heads: HeadShape, cache: tuple[Tensor, Tensor], scale: float, window: int | None = None
    ) -> Array:
        """Attend to each row's cached tokens, causally. # [num_tokens, num_heads * head_dim]

        window: how many tokens a query sees, its own included; None: all.
        """


class LinearAttentionPass(Protocol):
    """What a pass needs in addition for linear attention layers, and for the gates of models that have such layers.

    A state belongs to a request, and lies where the step's rows say. It is updated in place.
    """

    def split(self, x: Array, sizes: Sequence[int]) -> Sequence[Array]:
        """Split [num_tokens, sum(sizes)] by columns. # each [num_tokens, size]"""

    def sigmoid_gate(self, x: Array, gate: Array, other: Array | None = None) -> Array:
        """x * sigmoid(gate), plus `other`. gate: as x, or [num_tokens, 1]. # as x"""

    def causal_conv(self, x: Array, weight: Tensor, state: Tensor) -> Array:
        """silu(convolution over each channel's last tokens); see kernels.reference.causal_conv. # as x

        weight: [channels, kernel]; state: [slots, kernel - 1, channels] in x's type.
        """

    def delta_rule(
        self, qkv: Array, strength: Array, step: Array, rates: tuple[Tensor, Tensor], heads: LinearHeads, state: Tensor
    ) -> Array:
        """The gated delta rule; see kernels.reference.delta_rule. # [num_tokens, value_size]

        rates: see kernels.reference.log_decay; state: [slots, value heads, key_dim, value_dim] float32.
        """

    def gated_rms_norm(self, x: Array, gate: Array, weight: Tensor, eps: float) -> Array:
        """rms_norm(x) * silu(gate), the norm over heads of the weight's size. # as x"""
