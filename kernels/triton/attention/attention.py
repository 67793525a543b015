"""Owns the launches of paged attention: decode rows with their keys split, chunks with their context, in any mixture.
Never computes, and never asks the device how long a row is: the host knows what sizes a launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.attention.combine import combine
from kernels.triton.attention.kernel import attend_chunks, attend_decodes
from kernels.triton.attention.plan import AttentionPlan
from kernels.triton.shared.launch import padded

UNLIMITED = 1 << 30
"""A sliding window or a split that no row fills: 2**30 tokens."""


@dataclass(frozen=True, slots=True)
class _Call:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: AttentionPlan
    scale: float
    window: int | None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[2]

    def decode(self, out: Tensor) -> None:
        """Attend for the decode rows, with their keys in splits if any row may be longer than one."""
        rows, splits = self.plan.num_decode, self.plan.num_splits
        _, _, kv_heads, _ = self.k_cache.shape
        launch = attend_decodes[rows, kv_heads, splits]
        if splits == 1:
            self._start(launch, out, decode=True)
            return
        parts = self.q.new_empty((rows, self.q.shape[1], splits, self.q.shape[2]), dtype=torch.float32)
        lse = self.q.new_empty((rows, self.q.shape[1], splits), dtype=torch.float32)
        self._start(launch, parts, lse, decode=True)
        combine(parts, lse, self.plan.lengths, self.plan.decodes, self.plan.split, out)

    def chunks(self, out: Tensor) -> None:
        """Attend for the chunks, with as many programs as their tokens can need; surplus ones find nothing to do."""
        pairs, num_chunks, kv_heads = len(self.q) * self.group, self.plan.num_chunks, self.k_cache.shape[2]
        launch = attend_chunks[lambda chosen: (pairs // chosen["TILE"] + num_chunks, kv_heads, 1)]
        self._start(launch, out, decode=False)

    def _start(self, launch: Callable[..., object], out: Tensor, lse: Tensor | None = None, *, decode: bool) -> None:
        """Launch `attend`. lse: given if keys are split; see there."""
        plan, (_, block_size, kv_heads, head_dim) = self.plan, self.k_cache.shape
        launch(
            self.q,
            self.k_cache,
            self.v_cache,
            out,
            lse,
            plan.begins,
            plan.lengths,
            plan.block_tables,
            plan.decodes,
            self.q.stride(0),
            plan.block_tables.stride(0),
            len(plan.lengths),
            1 if lse is None else lse.shape[2],
            UNLIMITED if self.window is None else self.window,
            self.scale * math.log2(math.e),
            UNLIMITED if lse is None else plan.split,
            DECODE=decode,
            WINDOWED=self.window is not None,
            NUM_KV_HEADS=kv_heads,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            HEAD_PADDED=padded(head_dim, least=16),
            BLOCK_SIZE=block_size,
            **({"TILE": padded(self.group, least=16)} if decode else {}),
        )


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over each row's cached tokens, causal. # [num_tokens, heads, head_dim]

    q: [num_tokens, heads, head_dim], each token contiguous; caches: [num_blocks, block_size, kv_heads, head_dim],
    contiguous, with this step's K and V. window: how many tokens a query sees, its own included; None: all. Padding
    tokens of `out` are left as they are.

    Raises:
        ValueError: a tensor is not contiguous as required, or the window holds no token.
    """
    for name, tensor in (("q", q[:1]), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}: expected a contiguous tensor."
            )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: expected at least 1, the query's own token.")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    call = _Call(q, k_cache, v_cache, plan, scale, window)
    if plan.num_decode:
        call.decode(out)
    if plan.num_chunks:
        call.chunks(out)
    return out
