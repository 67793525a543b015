"""Owns what attention must know of a step's rows, as integers on the device.
Never reads a tensor back: what sizes a launch is known on the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.rows.step import PagedRows

SPLIT = 512
"""Keys of a decode row that one program reads. Splits begin at fixed positions, so a row's sums have one order,
whatever is beside it in the batch and however long that is."""

MOST_SPLITS = 32
"""Of one row. A longer row's splits are longer, by its own length alone: programs for the longest row there may be are
started for every row of a captured step, and most find nothing to do."""

_ALIGNED = 32  # int32 numbers: 128 bytes, so that every part begins where a wide load may


@runtime_checkable
class RowsOnDevice(Protocol):
    """Rows whose numbers are in tensors already, such as those that a captured graph reads in each replay."""

    num_decode: int
    num_chunks: int
    decodes: Tensor
    first_tokens: Tensor
    lengths: Tensor
    tables: Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Decode rows come first, with one token each. A row of length 0 is padding:

    rows     | decodes | chunks          | padding ... |
    tokens   | 1 each  | begins say      | 0 each      |
    """

    begins: Tensor
    """[num_rows + 1] int32, each row's first token in the step's tensors, and where the last one ends."""
    lengths: Tensor
    """[num_rows] int32, tokens of the request that are in the cache, this step's included."""
    block_tables: Tensor
    """[num_rows, max_blocks] int32"""
    decodes: Tensor
    """[1] int32, how many of the rows are decodes"""
    num_decode: int
    """No more decodes are ever in these tensors."""
    num_chunks: int
    """No more rows that are none, padding included."""
    max_length: int
    """No row that is ever in these tensors is longer."""
    split: int = SPLIT

    @property
    def num_splits(self) -> int:
        """Of the longest decode row that there may be."""
        return min(max(1, -(-self.max_length // self.split)), MOST_SPLITS)


def prepare_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Where the block tables are; one copy there, from pinned memory, which nothing waits for."""
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
