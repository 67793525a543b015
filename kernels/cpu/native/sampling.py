"""Owns the call that draws tokens in the library: what each row asks for, packed as sample.h reads it.
Never chooses a token itself; `kernels.reference.sample` says which is right."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.native.library import load_library
from kernels.cpu.native.program import Team


class DrawnRow(NamedTuple):
    """A row of logits to draw from, with its controls applied; DrawnRow of sample.h."""

    row: int
    """Of the logits."""
    seed: int
    """With `position`, all that the random number depends on: 64 bits of each."""
    position: int
    top_k: int
    """0, or at least the vocabulary: no limit."""
    temperature: float
    top_p: float
    min_p: float


class _DrawnRow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in DrawnRow._fields[:4]] + [
        (name, ctypes.c_double) for name in DrawnRow._fields[4:]
    ]


def draw_rows(team: Team, logits: Tensor, rows: Sequence[DrawnRow]) -> list[int]:
    """The token of each of `rows`, which depends on that row alone. logits: [.., vocab] float32; in rows that are drawn
    from, the largest is finite, and none is NaN.

    Raises:
        ValueError: logits that lie otherwise in memory, or a row that they do not have.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(f"logits {list(logits.shape)} in {logits.dtype}: expected two contiguous float32 dimensions.")
    for row in rows:
        if not 0 <= row[0] < len(logits):
            raise ValueError(f"row {row[0]} of {len(logits)} rows of logits.")
    tuples: Sequence[Any] = rows  # which ctypes makes structures of
    packed, tokens = (_DrawnRow * len(rows))(*tuples), (ctypes.c_int64 * len(rows))()
    load_library().draw_rows(team.handle, logits.data_ptr(), logits.shape[1], packed, len(rows), tokens)
    return list(tokens)
