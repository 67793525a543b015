"""Owns LoRA adapters as the library reads them: factors of each matrix, and which outputs lie in a panel's lanes.
Never reads an adapter's files, and never keeps an adapter in memory: whoever runs a step with it does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.native.grouped import LANES

MAX_PARTS = 3
"""The same as in low_rank.h."""


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A packed matrix that adapters add to."""

    number: int
    """Its index in each adapter's factors."""
    max_rank: int
    firsts: tuple[int, ...]
    """Where the outputs of each part begin; see kernels.forward.LowRankStack."""
    lanes: Tensor
    """[panels, 32] int32: the output of each lane of its panels; a lane of padding has any output of the same part"""

    @property
    def width(self) -> int:
        """The most ranks of all parts together."""
        return len(self.firsts) * whole_pairs(self.max_rank)

    def parts(self) -> Tensor:
        """Return the part of each half of a panel. # [panels, 2] uint8"""
        assert len(self.firsts) <= MAX_PARTS
        found = torch.bucketize(self.lanes, torch.tensor(self.firsts[1:], dtype=torch.int32), right=True)
        halves = found.view(len(found), 2, LANES)
        assert (halves == halves[..., :1]).all(), "sixteen lanes are of one part"
        return halves[..., 0].to(torch.uint8)


def whole_pairs(rank: int) -> int:
    """Return the ranks that a rank takes: kernels read two at a time."""
    return rank + rank % 2


class _LowRank(ctypes.Structure):
    """Mirrors LowRank of low_rank.h."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("firsts", ctypes.c_int64 * MAX_PARTS),
    ]


class PackedAdapter:
    """An adapter's factors of all matrices, as `StepRows` takes them."""

    def __init__(self, num_matrices: int, dtype: torch.dtype) -> None:
        """dtype: that of the activations and of the factors."""
        self._dtype = dtype
        self._table: Any = (_LowRank * num_matrices)()  # null where nothing is added
        self._kept: list[Tensor] = []

    def put(self, matrix: AdaptedMatrix, a: Sequence[Tensor | None], b: Tensor) -> None:
        """Set what is added to a matrix: y += (x a^T) b^T, for each part of the outputs.

        a: for each part [rank, inputs], or None if the adapter does not adapt it; at least one is not None.
        b: [outputs, rank]: output n takes the ranks of its own part. Includes the adapter's scale.
        """
        assert len(a) == len(matrix.firsts)
        assert b.shape[1] <= matrix.max_rank
        odd, rank = b.shape[1] % 2, whole_pairs(b.shape[1])
        firsts, kept = [-1] * MAX_PARTS, list[Tensor]()
        for number, part in enumerate(a):
            if part is not None:
                assert len(part) == b.shape[1]
                firsts[number] = rank * len(kept)
                kept.append(F.pad(part.to(self._dtype), (0, 0, 0, odd)))
        rows = torch.cat(kept)  # [num_ranks, inputs]
        pair = 1 if self._dtype == torch.float32 else 2
        by_lane = F.pad(b.to(self._dtype), (0, odd))[matrix.lanes]  # [panels, 32, rank]
        pairs = by_lane.view(*by_lane.shape[:2], rank // pair, pair)
        lanes = pairs.transpose(1, 2).contiguous()  # [panels, rank / pair, 32, pair]
        self._kept += [rows, lanes]
        self._table[matrix.number] = _LowRank(
            rows.data_ptr(), lanes.data_ptr(), rank, len(rows), (ctypes.c_int64 * MAX_PARTS)(*firsts)
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._table)

    @property
    def num_bytes(self) -> int:
        """The bytes of all factors."""
        return sum(tensor.nbytes for tensor in self._kept)
