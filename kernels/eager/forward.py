"""Owns the forward pass that runs each operation as it comes, on tensors, from a table of operators.
Never keeps anything from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.collectives.experts import exchange_experts
from kernels.collectives.group import Exchanging, Group
from kernels.eager.ops import Ops
from kernels.eager.rewind import Advance, Rewind
from kernels.forward import GELU, SILU, HeadShape, Linear, LinearHeads, Routing
from kernels.rows.step import StateRows


class Adapters(Protocol):
    """The LoRA adapters of one step."""

    def add(self, y: Tensor, x: Tensor, linear: Linear) -> None:
        """Add to y = linear(x) what the tokens' adapters have for `linear`, in place."""


def multiply(ops: Ops, linear: Linear, x: Tensor) -> Tensor:
    """x W^T + b. # [num_tokens, outputs]"""
    if isinstance(linear.weight, Tensor):
        return F.linear(x, linear.weight, linear.bias) if ops.linear is None else ops.linear(x, linear)
    assert ops.narrow is not None, "only these operators pack weights"
    return ops.narrow.linear(x, linear)


def mix_experts(ops: Ops, x: Tensor, router: Tensor, weights: tuple[Linear, Linear], routing: Routing) -> Tensor:
    """Sum the outputs of each token's experts; see ForwardPass.experts. weights: gate_up and down."""
    if all(isinstance(linear.weight, Tensor) for linear in weights):
        return ops.experts(x, router, weights[0].weight, weights[1].weight, routing)
    assert ops.narrow is not None, "only these operators pack weights"
    return ops.narrow.experts(x, router, *weights, routing)


class EagerPass:
    """A kernels.forward.ForwardPass over one step, and a LinearAttentionPass where there are states.

    token_ids, positions, slots: [num_tokens] int64.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: object,
        states: StateRows | None = None,
        rewind: Rewind | None = None,
        adapters: Adapters | None = None,
        group: Group | None = None,
        expert_ranks: Exchanging | None = None,
    ) -> None:
        """plan: what `ops.prepare_attention` returned for the step's rows. states: None if the model has no recurrent
        state. rewind: records each state before a step with drafts advances it. adapters: None if no token has one.
        group: the ranks that compute the model together. None: this one alone does. expert_ranks: those that have the
        experts between them, each with tokens of its own. None: all experts are here."""
        self._ops = ops
        self._token_ids, self._positions, self._slots = token_ids, positions, slots
        self._plan = plan
        self._states = states
        self._rewind = rewind
        self._adapters = adapters
        self._group = group
        self._expert_ranks = expert_ranks

    def embed(self, table: Tensor, scale: float = 1.0) -> Tensor:
        found = F.embedding(self._token_ids, table)
        return found if scale == 1.0 else found * scale

    def rotations(self, inverse_frequencies: Tensor, factors: Tensor | float) -> tuple[Tensor, Tensor]:
        """cos and sin, each [num_tokens, head_dim / 2] float32."""
        angles = self._positions.to(torch.float32).unsqueeze(1) * inverse_frequencies
        return angles.cos() * factors, angles.sin() * factors

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = torch.zeros_like(x, dtype=torch.float32)
        return self._ops.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        y = multiply(self._ops, linear, x)
        if self._adapters is not None:
            self._adapters.add(y, x, linear)
        return y

    def gated_linear(self, x: Tensor, linear: Linear, activation: str = SILU) -> Tensor:
        fused = None if activation == GELU or self._adapters is not None else self._ops.gated_linear
        if fused is not None and isinstance(linear.weight, Tensor):
            return fused(x, linear)
        gate_and_up = self.linear(x, linear)
        return self._ops.gelu_and_mul(gate_and_up) if activation == GELU else self._ops.silu_and_mul(gate_and_up)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in place.

        Raises:
            RankLostError: a rank is lost.
        """
        assert self._group is not None, "there are no ranks to sum over"
        return self._group.all_reduce(x)

    def experts(self, x: Tensor, router: Tensor, gate_up: Linear, down: Linear, routing: Routing) -> Tensor:
        if self._expert_ranks is not None:
            return exchange_experts(self._expert_ranks, x, router, gate_up.weight, down.weight, routing)
        return mix_experts(self._ops, x, router, (gate_up, down), routing)

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

    def attention(
        self, q: Tensor, heads: HeadShape, cache: tuple[Tensor, Tensor], scale: float, window: int | None = None
    ) -> Tensor:
        by_head = q.view(len(q), heads.num_heads, heads.head_dim)
        return self._ops.attention(by_head, *cache, self._plan, scale, window=window).flatten(1)

    # --- linear attention ---------------------------------------------------------------------------------------------

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        parts: tuple[Tensor, ...] = x.split(tuple(sizes), dim=-1)  # type: ignore[no-untyped-call]
        return parts

    def sigmoid_gate(self, x: Tensor, gate: Tensor, other: Tensor | None = None) -> Tensor:
        return self._ops.sigmoid_gate(x, gate, other)

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        def advance(inputs: Sequence[Tensor], rows: StateRows) -> Tensor:
            return self._ops.causal_conv(inputs[0], weight, state, rows)

        return self._advance(advance, (x,), state)

    def delta_rule(
        self,
        qkv: Tensor,
        strength: Tensor,
        step: Tensor,
        rates: tuple[Tensor, Tensor],
        heads: LinearHeads,
        state: Tensor,
    ) -> Tensor:
        def advance(inputs: Sequence[Tensor], rows: StateRows) -> Tensor:
            qkv, strength, step = inputs
            return self._ops.delta_rule(qkv, strength, step, rates, heads, state, rows)

        return self._advance(advance, (qkv, strength, step), state)

    def _advance(self, advance: Advance, inputs: Sequence[Tensor], state: Tensor) -> Tensor:
        assert self._states is not None
        if self._rewind is not None:
            self._rewind.keep(state, inputs, advance)
        return advance(inputs, self._states)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.gated_rms_norm(x, gate, weight, eps)
