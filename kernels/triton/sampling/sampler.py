"""Owns the choice of tokens on the device: from logits to token ids, in a few launches that a graph can capture.
Never copies a logit to the host, and never lets a row's draw depend on other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.sampling.controls import control_logits
from kernels.triton.sampling.filter import filter_row
from kernels.triton.sampling.rows import SampledRows
from kernels.triton.sampling.sample import sample_row
from kernels.triton.sampling.scan import BLOCK, GROUP, NUM_WARPS, scan_rows
from kernels.triton.shared.launch import padded

# Rows filtered at a time. Each needs 8 bytes per token of the vocabulary: 128 rows of 150,000 tokens take 154 MB.
ROWS_AT_A_TIME = 128


def sample(logits: Tensor, rows: SampledRows, *, out: Tensor | None = None) -> Tensor:
    """Choose a token for each row, as `kernels.reference` defines it; -1: the largest logit is not finite, or one is
    NaN. # [rows] int64

    logits: [rows, vocab] of any float type, rows contiguous; not modified. Ties go to the lower token id.

    Raises:
        ValueError: `logits` and `rows` have different numbers of rows.
    """
    if len(logits) != len(rows.temperatures):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows.temperatures)} rows.")
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    controlled = control_logits(logits, rows)
    for first in range(0, len(logits), ROWS_AT_A_TIME):
        piece = slice(first, first + ROWS_AT_A_TIME)
        _sample(controlled[piece], rows, piece, out[piece])
    return out


def _sample(logits: Tensor, rows: SampledRows, piece: slice, tokens: Tensor) -> None:
    (num_rows, vocab), device = logits.shape, logits.device

    def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    bests, totals, sizes = numbers(torch.float32), numbers(torch.float64), numbers(torch.int32)
    kept = numbers(torch.int32, vocab), numbers(torch.float32, vocab)
    temperatures, top_ks, top_ps, min_ps = (
        values[piece] for values in (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)
    )
    scanned = scan_rows(logits, temperatures, top_ks)
    num_blocks, num_groups = scanned.bests.shape[1], scanned.peaks.shape[1]
    found = (tokens, bests, totals, sizes, *kept, vocab, num_blocks)
    filter_row[(num_rows,)](
        logits, logits.stride(0), temperatures, top_ks, top_ps, min_ps,
        *scanned, numbers(torch.int32, num_groups), *found,
        BLOCK, GROUP, padded(num_blocks), padded(num_groups), num_warps=NUM_WARPS,
    )  # fmt: skip
    sample_row[(num_rows,)](
        logits, logits.stride(0), temperatures, top_ps, min_ps, rows.seeds[piece], rows.positions[piece],
        scanned.bests, scanned.masses, *found, BLOCK, padded(num_blocks), num_warps=NUM_WARPS,
    )  # fmt: skip
