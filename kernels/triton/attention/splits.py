"""Owns how a row's keys are split among programs: by its length, its count of tokens, and the most decodes of a step.
Never looks at the lengths of other rows: in steps of one captured size, a row's sums have one order beside any others.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPLIT = 256
"""The fewest keys of a split where a few rows decode. A chunk's splits have at least twice as many, in every step."""
FEW_SPLITS = 2048
SPLITS = ((16, 128), (64, SPLIT))
"""The fewest keys of a split by the most decodes of a step, times KV heads, and FEW_SPLITS with more. Splits keep a GPU
busy that rows alone would not, and each costs partial results and a beginning. The thresholds were measured on an
H200, with 132 multiprocessors. They are constants, so that the order of sums depends on no machine."""
FINE_SPLITS = 16
"""The most splits of the fewest keys. A longer row has splits of twice as many keys, and fewer partial results."""
MOST_SPLITS = 32
"""The most splits of a row with one token. A longer row has longer splits."""
MOST_CHUNK_SPLITS = 16
"""The most splits of a row with more tokens."""
CHUNK_PARTIALS = 256
"""The most partial results of such a row: its tokens times its splits. 50 tokens of a model with 4 queries for each of
8 KV heads are 4 tiles of 64 queries: with 5 splits, 160 programs. 129 tokens and more are never split: they have
programs enough."""
STEP = 128
"""What the size of longer splits is a multiple of: all key tiles are full, except at a row's end."""

UNITS = 0
"""In place of a split's fewest keys: batch-invariant sums. The keys of a unit are summed up alone, and units are merged
in order, by one program or from partial results, to the same bits."""
UNIT = 1024
"""Keys of a unit. A constant, because it decides the order of sums."""
UNIT_PARTIALS = 1024
"""The most partial results of a row by units: its tokens times its units. With more, a program has all units of its
queries, and there are queries enough. It does not decide any sum."""


def least_split(num_decode: int, kv_heads: int, *, chunks: bool) -> int:
    """Return the fewest keys of a split in steps of up to `num_decode` decodes. chunks: whether they have any, beside
    which a GPU needs no more splits of decodes than of SPLIT keys."""
    found = next((split for most, split in SPLITS if num_decode * kv_heads <= most), FEW_SPLITS)
    return max(found, SPLIT) if chunks else found


def split_size(length: int, count: int, split: int = SPLIT) -> int:
    """Return the keys in each split of a row. Splits begin at multiples of it.

    length: the row's keys, at least 1; count: its tokens in this step, at least 1; split: in place of SPLIT, or UNITS.
    """
    if split == UNITS:
        units = -(-length // UNIT)
        return UNIT if count * units <= UNIT_PARTIALS else units * UNIT
    if count == 1 and -(-length // split) <= FINE_SPLITS:
        return split
    most = MOST_SPLITS if count == 1 else min(max(count, CHUNK_PARTIALS) // count, MOST_CHUNK_SPLITS)
    least = split if count == 1 else min(split, SPLIT)
    return max(2 * least, -(-length // (most * STEP)) * STEP)


def num_splits(length: int, count: int, split: int = SPLIT) -> int:
    """Return how many splits a row has; see split_size."""
    return -(-length // split_size(length, count, split))


def most_splits(max_length: int, split: int = SPLIT) -> int:
    """Return the most splits of any row of up to `max_length` keys and one token."""
    if split == UNITS:
        return min(-(-max_length // UNIT), UNIT_PARTIALS)
    return min(-(-max_length // split), MOST_SPLITS)


def most_chunk_splits(max_length: int, split: int = SPLIT) -> int:
    """Return the most splits of any row of up to `max_length` keys and more tokens."""
    if split == UNITS:
        return most_splits(max_length, split)
    return min(-(-max_length // (2 * min(split, SPLIT))), MOST_CHUNK_SPLITS)


_SPLIT = tl.constexpr(SPLIT)
_FINE_SPLITS = tl.constexpr(FINE_SPLITS)
_MOST_SPLITS = tl.constexpr(MOST_SPLITS)
_MOST_CHUNK_SPLITS = tl.constexpr(MOST_CHUNK_SPLITS)
_CHUNK_PARTIALS = tl.constexpr(CHUNK_PARTIALS)
_STEP = tl.constexpr(STEP)
_UNITS, _UNIT, _UNIT_PARTIALS = tl.constexpr(UNITS), tl.constexpr(UNIT), tl.constexpr(UNIT_PARTIALS)


@triton.jit
def splits_of(length, count, window, split):
    """Return (keys in each split, splits, splits before the window of the row's first token); see split_size."""
    of_chunk = tl.minimum(tl.maximum(count, _CHUNK_PARTIALS) // count, _MOST_CHUNK_SPLITS)
    most = tl.where(count == 1, _MOST_SPLITS, of_chunk)
    least = tl.where(count == 1, split, tl.minimum(split, _SPLIT))
    coarse = tl.maximum(2 * least, tl.cdiv(length, most * _STEP) * _STEP)
    size = tl.where((count == 1) & (length <= split * _FINE_SPLITS), split, coarse)
    units = tl.cdiv(length, _UNIT)
    in_units = tl.where(count * units <= _UNIT_PARTIALS, _UNIT, units * _UNIT)
    size = tl.where(split == _UNITS, in_units, size)
    return size, tl.cdiv(length, size), tl.maximum(length - count - window + 1, 0) // size
