"""Owns the translation of a StepPlan into tensors: ids, positions, cache slots and row boundaries.
Never loops over tokens in Python, and never infers what a row is from its length."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from engine.step import RowKind, StepPlan
from kernels.reference import PagedRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors; tokens of all rows one after another, in the plan's order."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: where each token's K and V go
    sampled_tokens: Tensor  # [sampling rows] int64: the last token of each row that samples
    rows: PagedRows


def build_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """Tensors of a plan whose decode rows come first.

    Raises:
        ValueError: a row is empty, lacks blocks, or a decode row follows a chunk or holds more than one token.
    """
    _check(plan, block_size)
    counts = [len(row.token_ids) for row in plan.rows]
    starts = [row.start for row in plan.rows]
    ends = list(accumulate(counts))
    block_tables = _block_tables(plan, block_size)
    row_of_token = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    first_position = torch.tensor([start - end + count for start, end, count in zip(starts, ends, counts, strict=True)])
    positions = torch.arange(ends[-1]) + first_position[row_of_token]
    return StepInputs(
        token_ids=torch.tensor(list(chain.from_iterable(row.token_ids for row in plan.rows))),
        positions=positions,
        slots=block_tables[row_of_token, positions // block_size] * block_size + positions % block_size,
        sampled_tokens=torch.tensor(
            [end - 1 for row, end in zip(plan.rows, ends, strict=True) if row.kind is not RowKind.MIDDLE],
            dtype=torch.int64,
        ),
        rows=PagedRows(
            num_decode=sum(row.kind is RowKind.DECODE for row in plan.rows),
            contexts=tuple(starts),
            counts=tuple(counts),
            block_tables=block_tables,
            block_size=block_size,
        ),
    )


def _check(plan: StepPlan, block_size: int) -> None:
    seen_chunk = False
    for row in plan.rows:
        if not row.token_ids or len(row.block_ids) * block_size < row.end:
            raise ValueError(f"Row {row.request_id}: {len(row.block_ids)} blocks for {row.start}..{row.end}.")
        if (row.sampling is None) is not (row.kind is RowKind.MIDDLE):
            raise ValueError(f"Row {row.request_id}: kind {row.kind.value} with sampling {row.sampling}.")
        if row.kind is RowKind.DECODE and (seen_chunk or len(row.token_ids) != 1):
            raise ValueError(f"Row {row.request_id}: a decode row comes before all chunks and holds one token.")
        seen_chunk = seen_chunk or row.kind is not RowKind.DECODE
    if not plan.rows:
        raise ValueError(f"Step {plan.step_id} has no rows.")


def _block_tables(plan: StepPlan, block_size: int) -> Tensor:
    """Each row's blocks up to its end, padded with its first. # [num_rows, max_blocks] int64"""
    needed = [-(-row.end // block_size) for row in plan.rows]
    width = max(needed)
    padded = chain.from_iterable(
        row.block_ids[:blocks] + row.block_ids[:1] * (width - blocks)
        for row, blocks in zip(plan.rows, needed, strict=True)
    )
    return torch.tensor(list(padded)).view(len(plan.rows), width)
