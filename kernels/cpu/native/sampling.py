"""Owns the library call that draws tokens, and the packing of each row's parameters as sample.h reads them.
Never chooses a token itself; `kernels.reference.sample` defines the right one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.native.library import load_library
from kernels.cpu.native.program import Team


class DrawnRow(NamedTuple):
    """How to draw from a row of logits that has its controls applied; mirrors DrawnRow of sample.h."""

    row: int
    """The row's index in the logits."""
    seed: int
    """The random number depends on this and `position` alone, on 64 bits of each."""
    position: int
    top_k: int
    """0, or at least the vocabulary's size: no limit."""
    temperature: float
    top_p: float
    min_p: float


class _DrawnRow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in DrawnRow._fields[:4]] + [
        (name, ctypes.c_double) for name in DrawnRow._fields[4:]
    ]


def draw_rows(team: Team, logits: Tensor, rows: Sequence[DrawnRow]) -> list[int]:
    """Draw a token for each of `rows`, which depends on that row alone. logits: [.., vocab] float32; in the rows drawn
    from, the largest is finite and none is NaN.

    Raises:
        ValueError: the logits have another type or memory layout, or do not have the row.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(f"logits {list(logits.shape)} in {logits.dtype}: expected two contiguous float32 dimensions.")
    for row in rows:
        if not 0 <= row[0] < len(logits):
            raise ValueError(f"row {row[0]} of {len(logits)} rows of logits.")
    tuples: Sequence[Any] = rows  # ctypes makes structures of them
    packed, tokens = (_DrawnRow * len(rows))(*tuples), (ctypes.c_int64 * len(rows))()
    load_library().draw_rows(team.handle, logits.data_ptr(), logits.shape[1], packed, len(rows), tokens)
    return list(tokens)
