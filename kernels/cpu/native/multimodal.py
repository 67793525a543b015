"""Owns the recording of a decoder whose tokens may belong to images: their embeddings and their three positions.
Never knows what an input is: a step names its spans, with embeddings that are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.native.linear_attention import LinearAttentionProgram
from kernels.cpu.native.program import Buffer, Packed, StepRows, Team


class MultimodalProgram(LinearAttentionProgram):
    """A Program that rotates each pair of a head by a token's frame, row or column (M-RoPE, arXiv 2409.12191), and has
    the embeddings of spans from the step. Every step of it needs `spans`."""

    def __init__(self, team: Team, axis_of_pair: Tensor, **how: Any) -> None:
        """axis_of_pair: [head_dim / 2] int64, 0: the frame, 1: the row, 2: the column. how: see Program."""
        super().__init__(team, **how)
        assert axis_of_pair.dtype == torch.int64
        assert 0 <= int(axis_of_pair.min()) <= int(axis_of_pair.max()) <= 2
        self._axis_of_pair = axis_of_pair
        self._hidden: int | None = None

    def run(self, rows: StepRows) -> None:
        """See Program.run.

        Raises:
            ValueError: an embedding is not of the size or type of this program, or a row has no shift.
        """
        if rows.spans is not None:
            rows.spans.check(rows.num_rows, self._hidden, self._dtype)
        super().run(rows)

    def embed(self, table: Tensor | Packed, scale: float = 1.0) -> Buffer:
        out = super().embed(table, scale)
        self._hidden = out.tensor.shape[1]
        self._library.program_fill(self._handle, self._wide, out.stride, out.address)
        return out

    def rotations(self, inverse_frequencies: Tensor, factors: Tensor | float) -> Buffer:
        frequencies = inverse_frequencies.float().contiguous()
        assert len(frequencies) == len(self._axis_of_pair)
        each = torch.zeros_like(frequencies) + factors
        out = self._new(2 * len(each), torch.float32)
        parts = (self._axis_of_pair, frequencies, each)
        self._library.program_rotations_by_axis(self._handle, *map(self._keep, parts), len(each), out.address)
        return out
