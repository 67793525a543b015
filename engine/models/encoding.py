"""Owns a decoder with an encoder on torch's operators: a row's tokens may be an input's, with three-part positions.
Never keeps an embedding: engine.models.contents does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.batch.inputs import build_inputs
from engine.models.computed import Computed
from engine.models.contents import Contents, Filled, row_begins
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.multimodal_inputs import Grid
from engine.step import StepPlan
from kernels.collectives.group import Group
from kernels.eager.forward import EagerPass, multiply
from kernels.eager.ops import Ops


class EncodingModel:
    """An engine.models.computed.Model on the operators of `ops`, for a model with an encoder."""

    def __init__(
        self,
        decoder: Decoder,
        contents: Contents,
        ops: Ops,
        cache: KVCache,
        block_size: int,
        *,
        group: Group | None = None,
    ) -> None:
        """group: the ranks that `decoder` is a shard for; each has a whole encoder. A step then may raise
        RankLostError. None: it is whole."""
        self.decoder = decoder
        self.contents = contents
        self.cache = cache
        self.state = None
        self.adapters = None
        self._ops = ops
        self._block_size = block_size
        self._group = group
        self._axis_of_pair = contents.axis_of_pair()

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        self.contents.update(plan)
        inputs = build_inputs(plan, self._block_size, newest)
        positions = rotary_positions(plan, inputs.positions)
        run = SectionedPass(
            self._ops,
            token_ids=inputs.token_ids,
            positions=positions[self._axis_of_pair].T,
            slots=inputs.slots,
            plan=self._ops.prepare_attention(inputs.rows, self.decoder.config.num_kv_heads, self.decoder.dtype),
            filled=self.contents.filled(plan),
            group=self._group,
        )
        hidden: Tensor = self.decoder.forward(run, self.cache)
        return Computed.by_head(
            hidden, inputs.sampled_tokens, partial(multiply, self._ops, self.decoder.weights.lm_head)
        )


class SectionedPass(EagerPass):
    """An EagerPass that rotates each pair of a head by its own position. positions: [num_tokens, pairs]"""

    def __init__(self, ops: Ops, *, filled: Sequence[Filled], **step: Any) -> None:
        super().__init__(ops, **step)
        self._filled = filled

    def embed(self, table: Tensor, scale: float = 1.0) -> Tensor:
        embedded = super().embed(table, scale)
        for one in self._filled:
            embedded[one.begin : one.end] = one.embeddings
        return embedded

    def rotations(self, inverse_frequencies: Tensor, factors: Tensor | float) -> tuple[Tensor, Tensor]:
        angles = self._positions.to(torch.float32) * inverse_frequencies
        return angles.cos() * factors, angles.sin() * factors


def rotary_positions(plan: StepPlan, indices: Tensor) -> Tensor:
    """Return the frame, row and column of each token. For text, all three are the token's index, shifted by the inputs
    before it. indices: [num_tokens], each token's index in its request; # [3, num_tokens] int64"""
    counts = torch.tensor([len(row.token_ids) for row in plan.rows])
    shifts = torch.tensor([row.inputs.shift if row.inputs else 0 for row in plan.rows]).repeat_interleave(counts)
    positions = (indices + shifts).repeat(3, 1)
    for row, begin in zip(plan.rows, row_begins(plan), strict=True):
        for one in row.inputs.placed if row.inputs else ():
            first, last = max(one.start, row.start), min(one.end, row.end)
            place, end = begin - row.start, begin + len(row.token_ids)
            in_grid = _grid_positions(one.grid)[:, first - one.start : last - one.start]
            positions[:, place + first : place + last] = one.position + in_grid
            positions[:, place + last : end] = indices[place + last : end] + one.shift_after
    return positions


def _grid_positions(grid: Grid) -> Tensor:
    """Return the frame, row and column of each token of a grid. # [3, frames * rows * columns]"""
    places = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
    return torch.stack([place.flatten() for place in places])
