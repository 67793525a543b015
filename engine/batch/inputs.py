"""Owns the translation of a StepPlan into tensors: ids, positions, cache slots and row boundaries.
Never loops over tokens in Python, and never infers what a row is from its length."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from types import MappingProxyType

import torch
from torch import Tensor

from engine.batch.row_order import sampled_positions
from engine.step import DRAFT_TOKEN, PENDING_TOKEN, RowKind, ScheduledRequest, StepPlan
from kernels.rows.integers import joined
from kernels.rows.step import PagedRows

NONE_PENDING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors. The rows' tokens follow one another in the plan's order."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: where each token's K and V go
    sampled_tokens: Tensor  # [sampled places] int64: tokens after which one is sampled; see sampled_positions
    rows: PagedRows
    state_slots: tuple[int, ...] = ()
    """Each row's state slot; empty if the model has no recurrent state."""
    adapter_slots: tuple[int, ...] = ()
    """The slot of each row's LoRA adapter on a device, -1 for none; empty if no row has one."""


def build_inputs(
    plan: StepPlan,
    block_size: int,
    newest: Mapping[str, int] = NONE_PENDING,
    *,
    num_state_slots: int = 0,
    drafts: bool = True,
) -> StepInputs:
    """Build the tensors of a plan whose rows are in kernel order (see row_order).

    newest: by request, the token that its PENDING_TOKEN stands for. num_state_slots: 0 means that the model has no
    recurrent state. drafts: whether rows may carry drafts.

    Raises:
        ValueError: a row breaks the contract of engine.step, or asks for something that this executor cannot do.
    """
    check_plan(plan, block_size, num_state_slots, drafts=drafts)
    counts = [len(row.token_ids) for row in plan.rows]
    starts = [row.start for row in plan.rows]
    ends = list(accumulate(counts))
    block_tables = _block_tables(plan, block_size)
    row_of_token = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts), output_size=ends[-1])
    first_position = torch.tensor([start - end + count for start, end, count in zip(starts, ends, counts, strict=True)])
    positions = torch.arange(ends[-1]) + first_position[row_of_token]
    return StepInputs(
        token_ids=int_tensor(fed_tokens(row, newest) for row in plan.rows),
        positions=positions,
        slots=block_tables[row_of_token, positions // block_size] * block_size + positions % block_size,
        sampled_tokens=torch.tensor(sampled_tokens(plan.rows, counts), dtype=torch.int64),
        rows=PagedRows(
            num_decode=sum(row.kind is RowKind.DECODE and len(row.token_ids) == 1 for row in plan.rows),
            contexts=tuple(starts),
            counts=tuple(counts),
            block_tables=block_tables,
            block_size=block_size,
        ),
        state_slots=tuple(row.state.slot for row in plan.rows if row.state is not None),
    )


def is_lost(row: ScheduledRequest, newest: Mapping[str, int]) -> bool:
    """Return whether the row continues from a token that was never sampled, because the request's row failed one step
    earlier."""
    return row.token_ids[0] == PENDING_TOKEN and row.request_id not in newest


def sampled_tokens(rows: Sequence[ScheduledRequest], counts: Sequence[int]) -> list[int]:
    """Return the indices of the step's tokens after which a token is sampled; see sampled_positions. counts: tokens of
    each row."""
    begins = list(accumulate(counts, initial=0))
    return [begins[place.number] + place.offset for place in sampled_positions(rows)]


def fed_tokens(row: ScheduledRequest, newest: Mapping[str, int]) -> tuple[int, ...]:
    """Return the row's token ids, with the sampled token in place of PENDING_TOKEN."""
    if row.token_ids[0] != PENDING_TOKEN:
        return row.token_ids
    return (newest.get(row.request_id, 0),)  # a lost row fails alone, so any token of the vocabulary will do


def check_plan(plan: StepPlan, block_size: int, num_state_slots: int = 0, *, drafts: bool = True) -> None:
    """Raise ValueError if a row breaks the contract of engine.step. num_state_slots: 0 for a model without state."""
    if not plan.rows or (plan.state_moves and not num_state_slots):
        raise ValueError(f"Step {plan.step_id} has {'state moves' if plan.rows else 'no rows'}.")
    seen_chunk = seen_drafts = False
    for row in plan.rows:
        if not row.token_ids or len(row.block_ids) * block_size < row.end:
            raise ValueError(f"Row {row.request_id}: {len(row.block_ids)} blocks for {row.start}..{row.end}.")
        if row.kind is not RowKind.LAST and (row.sampling is None) is not (row.kind is RowKind.MIDDLE):
            raise ValueError(f"Row {row.request_id}: kind {row.kind.value} with sampling {row.sampling}.")
        has_drafts = row.kind is RowKind.DECODE and len(row.token_ids) > 1
        if row.kind is RowKind.DECODE and (seen_chunk or (seen_drafts and not has_drafts)):
            raise ValueError(f"Row {row.request_id}: decode rows come before chunks, those without drafts first.")
        if has_drafts and row.token_ids[0] == PENDING_TOKEN:
            raise ValueError(f"Row {row.request_id}: drafts follow a token that is known.")
        if has_drafts and not drafts:
            raise ValueError(f"Row {row.request_id}: drafts, which this executor takes no state back from.")
        if has_drafts and DRAFT_TOKEN in row.token_ids:  # its embedding would be read from before the table
            raise ValueError(f"Row {row.request_id}: places for drafts, and no draft model has filled them.")
        if row.kind is not RowKind.DECODE and row.token_ids[0] == PENDING_TOKEN:
            raise ValueError(f"Row {row.request_id}: a chunk's tokens are known.")
        _check_options(row, num_state_slots)
        seen_drafts = seen_drafts or has_drafts
        seen_chunk = seen_chunk or row.kind is not RowKind.DECODE
    slots = [row.state.slot for row in plan.rows if row.state is not None]
    if len({*slots}) != len(slots):  # two threads or programs would write one state at the same time
        raise ValueError(f"Step {plan.step_id}: rows share a slot of states, {sorted(slots)}.")


def _check_options(row: ScheduledRequest, num_state_slots: int) -> None:
    if row.state is not None and not num_state_slots:
        raise ValueError(f"Row {row.request_id}: this model has no recurrent state.")
    if num_state_slots and (row.state is None or not 0 <= row.state.slot < num_state_slots):
        raise ValueError(f"Row {row.request_id}: state {row.state}, and there are {num_state_slots} slots.")
    if (scoring := row.scoring) is not None:
        end = scoring.first + len(scoring.token_ids)
        if not row.start <= scoring.first <= end <= row.end:
            raise ValueError(f"Row {row.request_id}: scores {scoring.first}..{end} of {row.start}..{row.end}.")


def _block_tables(plan: StepPlan, block_size: int) -> Tensor:
    """Return each row's blocks up to its end, padded with its first block. # [num_rows, max_blocks] int64"""
    needed = [-(-row.end // block_size) for row in plan.rows]
    width = max(needed)
    # Padding is repeated in C: beside one long row, that of hundreds is a hundred times as long as their own blocks.
    parts = (
        (row.block_ids[:blocks], array("q", row.block_ids[:1]) * (width - blocks))
        for row, blocks in zip(plan.rows, needed, strict=True)
    )
    return int_tensor(chain.from_iterable(parts)).view(len(plan.rows), width)


def int_tensor(parts: Iterable[Sequence[int]]) -> Tensor:
    """Join all parts into one int64 tensor. Seven times as fast as torch.tensor, which looks at each number's type."""
    return torch.frombuffer(joined(parts), dtype=torch.int64)
