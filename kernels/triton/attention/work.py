"""Owns a step's work items, (row, tile of queries, split of keys): their prefix sums over rows, and how many there are.
Never reads a tensor back: where the host does not know the rows, it has bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.splits import (
    CHUNK_PARTIALS,
    MOST_CHUNK_SPLITS,
    UNIT_PARTIALS,
    UNITS,
    most_chunk_splits,
    most_splits,
    num_splits,
    split_size,
    splits_of,
)
from kernels.triton.shared.launch import warps

UNLIMITED = 1 << 30
"""A sliding window that no row fills: 2**30 tokens."""
CHUNK_TILES = (64, 128)
"""The tiles of queries among which tuning chooses: each has sums of its own, since they are made before the launch."""

DECODE_ITEMS, PARTIALS, MERGED, CHUNK_ITEMS = (tl.constexpr(column) for column in range(4))
"""Columns of the sums: splits of decode rows, partial results (tokens times splits of rows that have several), tokens
with partial results, and items of chunks, a column for each of CHUNK_TILES."""
_COLUMNS = 3 + len(CHUNK_TILES)
_SMALLEST_TILE = tl.constexpr(CHUNK_TILES[0])
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do in each layer of a step. Numbers are exact if the host knows the rows, else upper bounds."""

    sums: Tensor
    """[_COLUMNS, num_rows + 1] int32, prefix sums over the rows, from 0."""
    exact: bool
    decode_items: int
    chunk_items: dict[int, int]
    """By the tile of queries."""
    partials: int
    """Partial results of one head. Without the rows, at most CHUNK_PARTIALS for each row, MOST_CHUNK_SPLITS for each
    row and each token, and for each token as many as the longest row may have splits: 256 rows of up to 32,768 keys
    with 2,048 tokens and 8 KV heads have up to 32,768, which take 540 MB for 32 heads of 128. 256 decodes have up to
    4,096."""
    merged: int
    """Tokens with partial results."""


def exact_work(
    sums: Tensor, rows: Sequence[tuple[int, int]], num_decode: int, group: int, window: int, split: int
) -> Work:
    """Count the work of rows that the host knows. rows: (length, count) of each; the first `num_decode` are decodes."""
    decode_items, partials, merged = 0, 0, 0
    chunk_items = dict.fromkeys(CHUNK_TILES, 0)
    for number, (length, count) in enumerate(rows):
        if not length or not count:
            continue
        splits = num_splits(length, count, split)
        used = splits - max(length - count - window + 1, 0) // split_size(length, count, split)
        if splits > 1:
            partials, merged = partials + count * splits, merged + count
        if number < num_decode:
            decode_items += used
            continue
        for tile in CHUNK_TILES:
            chunk_items[tile] += -(-count * group // tile) * used
    return Work(sums, True, decode_items, chunk_items, partials, merged)


def most_work(
    sums: Tensor, num_tokens: int, num_decode: int, num_chunks: int, max_length: int, group: int, split: int
) -> Work:
    """Bound the work of a captured step, whatever rows its tensors hold in a replay."""
    of_decode, num_rows = most_splits(max_length, split), sums.shape[1] - 1
    splits = max(of_decode, most_chunk_splits(max_length, split)) if num_chunks else of_decode
    # A step of decodes alone has none: it must not launch what finds nothing in every layer.
    items = {tile: (num_tokens * group // tile + num_chunks) * splits if num_chunks else 0 for tile in CHUNK_TILES}
    if split == UNITS:
        partials = min(UNIT_PARTIALS * num_rows, splits * num_tokens)
    else:
        partials = min(CHUNK_PARTIALS * num_rows, MOST_CHUNK_SPLITS * (num_tokens + num_rows), splits * num_tokens)
    if splits == 1:
        partials = 0
    return Work(sums, False, of_decode * num_decode, items, partials, num_tokens if partials else 0)


def sum_items(begins: Tensor, lengths: Tensor, decodes: Tensor, group: int, window: int, split: int) -> Tensor:
    """Sum up the items of the rows, on their device. # [_COLUMNS, num_rows + 1] int32

    begins: [num_rows + 1] int32; lengths: [num_rows] int32; decodes: [1] int32; see AttentionPlan.
    """
    sums, rows = lengths.new_empty((_COLUMNS, len(lengths) + 1)), _ROWS_AT_A_TIME
    _sum_items[(_COLUMNS,)](
        begins, lengths, decodes, sums, len(lengths), window, split, GROUP=group, BLOCK=rows, num_warps=warps(rows)
    )
    return sums


@triton.jit(
    do_not_specialize=["num_rows", "window"],
    # They are slices of one tensor: their alignment must not choose between compiled kernels.
    do_not_specialize_on_alignment=["begins", "lengths", "decodes"],
)
def _sum_items(begins, lengths, decodes, sums, num_rows, window, split, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """One column per program, BLOCK rows at a time."""
    column, num_decode = tl.program_id(0), tl.load(decodes)
    sums += column * (num_rows + 1)
    tl.store(sums, 0)
    before = 0
    for first in tl.range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        real = row < num_rows
        length = tl.load(lengths + row, mask=real, other=0)
        count = tl.load(begins + row + 1, mask=real, other=0) - tl.load(begins + row, mask=real, other=0)
        count = tl.where(length > 0, count, 0)
        _, splits, skipped = splits_of(length, tl.maximum(count, 1), window, split)
        tokens = tl.where(splits > 1, count, 0)
        pairs, tile = count * GROUP, _SMALLEST_TILE << tl.maximum(column - CHUNK_ITEMS, 0)
        tiles = tl.where(column == DECODE_ITEMS, tl.minimum(count, 1), tl.cdiv(pairs, tile))
        mine = (row < num_decode) == (column == DECODE_ITEMS)
        items = tl.where(mine, tiles * (splits - skipped), 0)
        found = tl.where(column == PARTIALS, tokens * splits, tl.where(column == MERGED, tokens, items))
        tl.store(sums + 1 + row, before + tl.cumsum(found, 0), mask=real)
        before += tl.sum(found, 0)
