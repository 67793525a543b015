"""Owns the launches of paged attention: one over the items of decode rows, one over those of chunks, in any mixture.
Never computes, and never asks the device how long a row is: the host knows what sizes a launch, or a bound of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.triton.attention.combine import HEADS, combine
from kernels.triton.attention.kernel import (
    ONE_ENTRY,
    WIDE_HEADS,
    attend_chunks,
    attend_decodes,
    attend_invariantly,
    attend_wide_heads_invariantly,
)
from kernels.triton.attention.plan import AttentionPlan
from kernels.triton.attention.splits import STEP, UNIT, UNITS
from kernels.triton.attention.work import UNLIMITED, Work
from kernels.triton.shared.launch import NO_FUSION, multiprocessors, padded
from kernels.triton.shared.narrow_cache import readable

PROGRAMS_PER_MULTIPROCESSOR = 8
"""How many programs a captured step has for each multiprocessor, those of all heads together. Two or three of attention
run there at a time: the others take the place of those that end early. `combine`, being smaller, has twice as many."""

MOST_PROGRAMS = 65_535
"""The most of a launch's second dimension. Each takes several items if there are more."""


@dataclass(frozen=True, slots=True)
class _Call:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: AttentionPlan
    work: Work
    scale: float
    window: int | None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[2]

    def run(self, out: Tensor) -> None:
        """Attend for decodes, then for chunks, and merge the splits of both."""
        work, (_, heads, head_dim) = self.work, self.q.shape
        kv_heads = self.k_cache.shape[2]
        parts = self.q.new_empty((work.partials, heads, head_dim), dtype=torch.float32)
        lse = self.q.new_empty((work.partials, heads), dtype=torch.float32)
        if work.decode_items:
            launch = attend_decodes[kv_heads, self._programs(work.decode_items, kv_heads)]
            self._start(launch, out, parts, lse, DECODE=True, UNIT=0, TILE=padded(self.group, least=16))
        if max(work.chunk_items.values()):
            if self.plan.split == UNITS:
                launch = attend_wide_heads_invariantly if head_dim > WIDE_HEADS else attend_invariantly
                how = {"UNIT": UNIT, **NO_FUSION}
            else:
                launch, how = attend_chunks, {"UNIT": 0}
            self._start(launch[self._chunk_grid], out, parts, lse, DECODE=False, **how)
        if work.partials:
            plan, window = self.plan, self._window
            programs = self._programs(work.merged, -(-heads // HEADS), each=2 * PROGRAMS_PER_MULTIPROCESSOR)
            combine(parts, lse, plan.begins, plan.lengths, work.sums, window, plan.split, programs, out)

    @property
    def _window(self) -> int:
        return UNLIMITED if self.window is None else self.window

    def _programs(self, items: int, heads: int, each: int = PROGRAMS_PER_MULTIPROCESSOR) -> int:
        """Return a program for each item; where `items` is a bound, no more than the GPU runs in a few turns. Programs
        of all heads for one item start before those for the next: the ones that find nothing to do start last."""
        if self.work.exact:
            return min(items, MOST_PROGRAMS)
        return min(items, -(-each * multiprocessors(self.q.device) // heads))

    def _chunk_grid(self, chosen: dict[str, Any]) -> tuple[int, int]:
        """Return the grid for the tile that tuning chose. Tiles that the tokens fill have programs of their own: their
        work differs most, and whichever is done takes the next from the GPU's own queue."""
        kv_heads, tile = self.k_cache.shape[2], chosen["TILE"]
        items = self.work.chunk_items[tile]
        filled = min(items, len(self.q) * self.group // tile)
        return kv_heads, max(self._programs(items, kv_heads), min(filled, MOST_PROGRAMS))

    def _start(self, launch: Any, out: Tensor, parts: Tensor, lse: Tensor, **constants: Any) -> None:
        plan, (_, block_size, kv_heads, _), head_dim = self.plan, self.k_cache.shape, self.q.shape[2]
        launch(
            self.q,
            readable(self.k_cache),
            readable(self.v_cache),
            out,
            parts,
            lse,
            plan.begins,
            plan.lengths,
            plan.block_tables,
            self.work.sums,
            self.q.stride(0),
            plan.block_tables.stride(0),
            len(plan.lengths),
            self._window,
            self.scale * math.log2(math.e),
            plan.split,
            WINDOWED=self.window is not None,
            NUM_KV_HEADS=kv_heads,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            HEAD_PADDED=padded(head_dim, least=16),
            BLOCK_SIZE=block_size,
            **constants,
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

    q: [num_tokens, heads, head_dim], each token contiguous; caches: [num_blocks, block_size, kv_heads,
    stored_size(head_dim)], contiguous, with this step's K and V. window: how many tokens a query sees, its own
    included; None: all. Padding tokens of `out` are left as they are.

    Raises:
        ValueError: a tensor is not contiguous as required, the window holds no token, or a split may begin within a
            tile of keys that is read by one entry of the block table.
    """
    for name, tensor in (("q", q[:1]), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}: expected a contiguous tensor."
            )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: expected at least 1, the query's own token.")
    if plan.split % STEP and k_cache.shape[1] >= ONE_ENTRY:
        raise ValueError(
            f"split is {plan.split}: expected a multiple of {STEP} with blocks of {k_cache.shape[1]} slots."
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    work = plan.work(len(q), q.shape[1] // k_cache.shape[2], UNLIMITED if window is None else window)
    _Call(q, k_cache, v_cache, plan, work, scale, window).run(out)
    return out
