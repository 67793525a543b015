"""Owns the choice of tokens on the device: from logits to token ids, in a few launches that a graph can capture.
Never copies a logit to the host, and never draws for one row by what is beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.controls import control_logits
from kernels.triton.draw import draw
from kernels.triton.launch import INTERPRETED
from kernels.triton.narrow import narrow
from kernels.triton.sampling_rows import SamplingRows

# Logits that a program looks at together. The interpreter pays for each block, and its tests cross several.
BLOCK = 256 if INTERPRETED else 2048
NUM_WARPS = 8
# Rows that are narrowed at a time: each needs 8 bytes for each token of the vocabulary, 128 of 150,000 take 154 MB.
ROWS_AT_A_TIME = 128


def sample(logits: Tensor, rows: SamplingRows, *, out: Tensor | None = None) -> Tensor:
    """One token for each row, as `kernels.reference` defines it; -1: its largest logit is not finite, or one is NaN.

    logits: [rows, vocab] of any float type, rows contiguous, which are not changed. Ties go to the lower token id.
    # [rows] int64

    Raises:
        ValueError: as many rows of logits as of `rows` were expected.
    """
    if len(logits) != len(rows.temperatures):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows.temperatures)} rows.")
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    controlled = control_logits(logits, rows)
    for first in range(0, len(logits), ROWS_AT_A_TIME):
        piece = slice(first, first + ROWS_AT_A_TIME)
        _sample(controlled[piece], rows, piece, out[piece])
    return out


def _sample(logits: Tensor, rows: SamplingRows, piece: slice, tokens: Tensor) -> None:
    (num_rows, vocab), device = logits.shape, logits.device
    bests = torch.empty(num_rows, dtype=torch.float32, device=device)
    totals = torch.empty(num_rows, dtype=torch.float64, device=device)
    sizes = torch.empty(num_rows, dtype=torch.int32, device=device)
    kept_ids = torch.empty(num_rows, vocab, dtype=torch.int32, device=device)
    kept_logits = torch.empty(num_rows, vocab, dtype=torch.float32, device=device)
    found = (tokens, bests, totals, sizes, kept_ids, kept_logits, vocab, BLOCK)
    temperatures, top_ps = rows.temperatures[piece], rows.top_ps[piece]
    narrow[(num_rows,)](logits, logits.stride(0), temperatures, rows.top_ks[piece], top_ps, *found, num_warps=NUM_WARPS)
    draw[(num_rows,)](
        logits, logits.stride(0), temperatures, top_ps, rows.min_ps[piece], rows.seeds[piece], rows.positions[piece],
        *found, num_warps=NUM_WARPS,
    )  # fmt: skip
