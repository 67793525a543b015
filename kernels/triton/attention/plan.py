"""Owns what attention must know of a step's rows, as integers on the device.
Never reads a tensor back: the host knows what sizes a launch, or a bound of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.rows.step import PagedRows
from kernels.triton.attention.splits import SPLIT, UNITS, least_split
from kernels.triton.attention.work import Work, exact_work, most_work, sum_items

_ALIGNED = 32  # int32 numbers: 128 bytes, so that every part is aligned for wide loads


@runtime_checkable
class RowsOnDevice(Protocol):
    """Rows whose numbers are already in tensors, such as those that a captured graph reads in each replay."""

    num_decode: int
    num_chunks: int
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    decodes: Tensor
    first_tokens: Tensor
    lengths: Tensor
    tables: Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's rows. Decodes come first, with one token each. A row of length 0 is padding:

    rows     | decodes | chunks          | padding ... |
    tokens   | 1 each  | begins say      | 0 each      |
    """

    begins: Tensor
    """[num_rows + 1] int32, each row's first token in the step's tensors, and where the last row ends."""
    lengths: Tensor
    """[num_rows] int32, the request's tokens in the cache, this step's included."""
    block_tables: Tensor
    """[num_rows, max_blocks] int32"""
    decodes: Tensor
    """[1] int32, how many of the rows are decodes"""
    num_decode: int
    """The most decodes that these tensors ever hold."""
    num_chunks: int
    """The most other rows that they ever hold, padding included."""
    max_length: int
    """The length of the longest row that they ever hold."""
    rows: tuple[tuple[int, int], ...] | None = None
    """(length, count of tokens) of each row. None: a captured step, whose tensors hold other rows in each replay."""
    split: int = SPLIT
    """The fewest keys of a split of a decode; of a chunk, at most SPLIT. UNITS: batch-invariant sums."""
    _works: dict[tuple[int, int], Work] = field(default_factory=dict, init=False, repr=False, compare=False)

    def work(self, num_tokens: int, group: int, window: int) -> Work:
        """Return what there is to do in a layer. The first layer of each kind sums it up on the device: a captured step
        does so in each replay, from the rows that its tensors then hold.

        num_tokens: of the step, padding included; group: query heads for each KV head; window: UNLIMITED if there is
        none.
        """
        if (group, window) not in self._works:
            sums = sum_items(self.begins, self.lengths, self.decodes, group, window, self.split)
            if self.rows is None:
                bounds = num_tokens, self.num_decode, self.num_chunks, self.max_length
                found = most_work(sums, *bounds, group, self.split)
            else:
                found = exact_work(sums, self.rows, self.num_decode, group, window, self.split)
            self._works[group, window] = found
        return self._works[group, window]


def prepare_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Build the plan on the block tables' device, with one copy from pinned memory that nothing waits for."""
    lengths = [context + count for context, count in zip(rows.contexts, rows.counts, strict=True)]
    known = tuple(zip(lengths, rows.counts, strict=True)) or None
    num_chunks = rows.num_chunks if isinstance(rows, RowsOnDevice) else len(lengths) - rows.num_decode
    split = least_split(rows.num_decode, kv_heads, chunks=num_chunks > 0)
    if isinstance(rows, RowsOnDevice):
        tensors = rows.first_tokens, rows.lengths, rows.tables, rows.decodes
        return AttentionPlan(*tensors, rows.num_decode, num_chunks, rows.max_length, known, split)
    device, shape = rows.block_tables.device, rows.block_tables.shape
    begins = list(accumulate(rows.counts, initial=0))
    parts = [torch.tensor(begins), torch.tensor(lengths), torch.tensor([rows.num_decode])]
    if device.type == "cpu":
        parts.append(rows.block_tables.flatten())
    sizes = [-(-len(part) // _ALIGNED) * _ALIGNED for part in parts]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for part, place in zip(parts, host.split(sizes), strict=True):
        place[: len(part)] = part
    places = host.to(device, non_blocking=True).split(sizes)
    on_device = [place[: len(part)] for part, place in zip(parts, places, strict=True)]
    tables = on_device[3].view(shape) if len(parts) == 4 else rows.block_tables.to(torch.int32)
    tensors = on_device[0], on_device[1], tables, on_device[2]
    return AttentionPlan(*tensors, rows.num_decode, num_chunks, max(lengths), known, split)


def prepare_invariant_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """The same for batch-invariant sums: decodes are chunks of one token, since one kernel has one order of sums."""
    plan = prepare_attention(rows, kv_heads, dtype)
    return replace(
        plan,
        decodes=torch.zeros_like(plan.decodes),
        num_decode=0,
        num_chunks=plan.num_decode + plan.num_chunks,
        split=UNITS,
    )
