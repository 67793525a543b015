"""Owns what attention must know of a step's rows, as integers on the device.
Never reads a tensor back: the host knows what sizes a launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.rows.step import PagedRows

SPLIT = 512
"""Keys of a decode row that one program reads. Splits begin at fixed positions, so that the order of a row's sums does
not depend on the other rows of the batch or their lengths."""

MOST_SPLITS = 32
"""The most splits of one row; a longer row has longer splits, which depend on its own length alone. A captured step
launches programs for the longest possible row on every row, and most of them find nothing to do."""

_ALIGNED = 32  # int32 numbers: 128 bytes, so that every part is aligned for wide loads


@runtime_checkable
class RowsOnDevice(Protocol):
    """Rows whose numbers are already in tensors, such as those that a captured graph reads in each replay."""

    num_decode: int
    num_chunks: int
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
    split: int = SPLIT

    @property
    def num_splits(self) -> int:
        """The splits of the longest possible decode row."""
        return min(max(1, -(-self.max_length // self.split)), MOST_SPLITS)


def prepare_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Build the plan on the block tables' device, with one copy from pinned memory that nothing waits for."""
    if isinstance(rows, RowsOnDevice):
        tensors = rows.first_tokens, rows.lengths, rows.tables, rows.decodes
        return AttentionPlan(*tensors, rows.num_decode, rows.num_chunks, rows.max_length)
    device, shape = rows.block_tables.device, rows.block_tables.shape
    begins = list(accumulate(rows.counts, initial=0))
    lengths = [context + count for context, count in zip(rows.contexts, rows.counts, strict=True)]
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
    num_chunks = len(lengths) - rows.num_decode
    return AttentionPlan(on_device[0], on_device[1], tables, on_device[2], rows.num_decode, num_chunks, max(lengths))
