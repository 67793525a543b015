"""Owns what a model's definition is written in: the operations of a forward pass, on whatever a backend computes with.
Never computes: `kernels.eager` runs operations as they come, `kernels.cpu.native` records them and runs the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Array = Any
"""What a backend's operations take and give: a Tensor, or a recorder's name for one."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Any
    """[outputs, inputs], or what a backend has made of it."""
    bias: Any = None
    """[outputs]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How the outputs of the stacked query, key and value projection divide into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class ForwardPass(Protocol):
    """One pass over a step's tokens. Shapes are those of `kernels.reference`; arrays have [num_tokens, ...]."""

    def embed(self, table: Tensor) -> Array:
        """Rows of `table` [vocab, hidden] for the step's token ids. # [num_tokens, hidden]"""

    def rotations(self, inverse_frequencies: Tensor, factor: float) -> Array:
        """cos and sin of the angles at the step's positions, times `factor`."""

    def add_rms_norm(self, x: Array, residual: Array | None, weight: Tensor, eps: float) -> tuple[Array, Array]:
        """(rms_norm(x + residual), x + residual in float32); None: there is no residual yet."""

    def linear(self, x: Array, linear: Linear) -> Array:
        """# [num_tokens, outputs]"""

    def gated_linear(self, x: Array, linear: Linear) -> Array:
        """silu(gate) * up of [gate | up] = linear(x). # [num_tokens, outputs / 2]"""

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

    def attention(self, q: Array, heads: HeadShape, cache: tuple[Tensor, Tensor], scale: float) -> Array:
        """# [num_tokens, num_heads * head_dim]"""
