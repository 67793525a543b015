"""Owns the forward pass that runs each operation as it comes, on tensors, by a table of operators.
Never keeps anything from one step to the next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forward import HeadShape, Linear
from kernels.ops import Ops


class EagerPass:
    """A kernels.forward.ForwardPass over one step. token_ids, positions, slots: [num_tokens] int64."""

    def __init__(self, ops: Ops, *, token_ids: Tensor, positions: Tensor, slots: Tensor, plan: object) -> None:
        """`plan`: what `ops.prepare_attention` made of the step's rows."""
        self._ops = ops
        self._token_ids, self._positions, self._slots = token_ids, positions, slots
        self._plan = plan

    def embed(self, table: Tensor) -> Tensor:
        return F.embedding(self._token_ids, table)

    def rotations(self, inverse_frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """cos and sin, each [num_tokens, head_dim / 2] float32."""
        angles = self._positions.to(torch.float32).unsqueeze(1) * inverse_frequencies
        return angles.cos() * factor, angles.sin() * factor

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = torch.zeros_like(x, dtype=torch.float32)
        return self._ops.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def gated_linear(self, x: Tensor, linear: Linear) -> Tensor:
        return self._ops.silu_and_mul(self.linear(x, linear))

    def rotate_and_cache(
        self,
        qkv: Tensor,
        rotations: tuple[Tensor, Tensor],
        heads: HeadShape,
        cache: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        num_heads, num_rotated = heads.num_heads, heads.num_heads + heads.num_kv_heads
        by_head = qkv.view(len(qkv), num_rotated + heads.num_kv_heads, heads.head_dim)
        q_and_k, v = by_head[:, :num_rotated], by_head[:, num_rotated:]
        if norms is not None:
            q = self._ops.rms_norm(q_and_k[:, :num_heads], norms[0], eps)
            k = self._ops.rms_norm(q_and_k[:, num_heads:], norms[1], eps)
            q_and_k = torch.cat((q, k), dim=1)
        rotated = self._ops.rope(q_and_k, *rotations)
        self._ops.write_cache(rotated[:, num_heads:], v, *cache, self._slots)
        return rotated[:, :num_heads].flatten(1)

    def attention(self, q: Tensor, heads: HeadShape, cache: tuple[Tensor, Tensor], scale: float) -> Tensor:
        by_head = q.view(len(q), heads.num_heads, heads.head_dim)
        return self._ops.attention(by_head, *cache, self._plan, scale).flatten(1)
