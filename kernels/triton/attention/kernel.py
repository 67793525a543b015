"""Owns the attention of a tile of queries to the keys of a split, through the block table, one work item after another.
Never reads a slot that a row does not own, and never asks the host how long a row is: programs read it themselves."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.keys import attend_keys
from kernels.triton.attention.merge import merge
from kernels.triton.attention.splits import splits_of
from kernels.triton.attention.work import CHUNK_ITEMS, CHUNK_TILES, DECODE_ITEMS, PARTIALS
from kernels.triton.shared.launch import fixed, tuned
from kernels.triton.shared.tiles import find_item_row

# The loop over keys also reads the block table, which takes pipeline stages, too: with 3 stages no tile of keys is
# being copied while another is computed on, with 5 one is, with 7 two are.
#
# Left alone, the compiler takes a fifth more registers than it needs for a head_dim of 128, and two programs instead of
# three run at a time. For one of 256 a limit spills: the last has none.
# On an H200, tiles of 32 keys are the best over K and V in 8 bits and for many rows, and those of 64 and 128 for few.
DECODE_CONFIGS = [
    triton.Config({"BLOCK_N": keys}, num_warps=warps, num_stages=stages, maxnreg=registers)
    for keys, warps, stages, registers in (
        *((64, 4, 5, 168), (32, 2, 5, None), (32, 4, 5, 128), (128, 4, 3, None)),
        *((64, 4, 3, 168), (64, 4, 5, None)),
    )
]
CHUNK_CONFIGS = [
    triton.Config({"TILE": queries, "BLOCK_N": keys}, num_warps=warps, num_stages=stages)
    for queries, keys, warps, stages in (
        # Only (64, 32, 4, 3) fits in 99 KiB of shared memory with a head_dim of 256.
        *((64, 64, 4, 5), (64, 64, 4, 3), (64, 32, 4, 5), (64, 32, 4, 3), (64, 128, 4, 5)),
        *((128, 64, 8, 3), (128, 64, 8, 5), (128, 64, 8, 7), (128, 128, 8, 3), (128, 128, 8, 5)),
    )
]

# Two sums of values are alive at a unit's end: with tiles of 64 keys, they spill. The first that fits is that of all
# rows.
INVARIANT_CONFIGS, WIDE_INVARIANT_CONFIGS = (
    [triton.Config({"TILE": 64, "BLOCK_N": 32}, num_warps=warps, num_stages=stages) for stages in (5, 3)]
    for warps in (4, 8)
)
WIDE_HEADS = 128
"""Heads of more than so many numbers take the latter."""

ONE_ENTRY = min(config.kwargs["BLOCK_N"] for config in DECODE_CONFIGS + CHUNK_CONFIGS + INVARIANT_CONFIGS)
"""Slots of a block from which on a tile of keys may have one entry of the block table: its tiles are within blocks."""
_SMALLEST_TILE = tl.constexpr(CHUNK_TILES[0])


@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "window"],
    # They are slices of one tensor: their alignment must not choose between compiled kernels.
    do_not_specialize_on_alignment=["begins", "lengths", "block_tables"],
)
def attend(
    q,
    k_cache,
    v_cache,
    out,
    parts,
    lse,
    begins,
    lengths,
    block_tables,
    sums,
    q_stride,
    table_stride,
    num_rows,
    window,
    scale,
    split,
    DECODE: tl.constexpr,
    WINDOWED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the keys of one split with TILE queries of one row, of the heads that share a KV head; then to the next
    item, as many further as there are programs. Online softmax as in Milakov and Gimelshein, 2018. Query m of a row is
    head m % GROUP of its token m // GROUP.

    The items of a row that has one split go to `out`, those of others to `parts` and `lse`, as combine reads them.
    sums: see Work. num_rows: decodes and all others. window: UNLIMITED if not WINDOWED. scale: includes log2(e). UNIT:
    0, and a split's keys are summed up at once; or so many are, whose sums are merged in order, and each of several
    splits is one unit.
    """
    kv_head = tl.program_id(0)
    NARROW: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth == 8
    if DECODE:
        items = sums + DECODE_ITEMS * (num_rows + 1)
    else:
        tl.static_assert((TILE == _SMALLEST_TILE) | (TILE == 2 * _SMALLEST_TILE), "one of CHUNK_TILES")
        items = sums + (CHUNK_ITEMS + TILE // _SMALLEST_TILE - 1) * (num_rows + 1)
    # What an item would find computed already, such as addresses within tiles, takes registers in the loops over keys.
    for item in tl.range(tl.program_id(1), tl.load(items + num_rows), tl.num_programs(1), disable_licm=True):
        row = find_item_row(items, num_rows, item)
        length, begin = tl.load(lengths + row), tl.load(begins + row)
        count = tl.load(begins + row + 1) - begin
        size, splits, skipped = splits_of(length, count, window, split)
        part, first = item - tl.load(items + row), 0
        if not DECODE:
            # The last tile sees the most keys: it is the first to be computed, or it would be waited for.
            used = splits - skipped
            first = (tl.cdiv(count * GROUP, TILE) - 1 - part // used) * TILE
            part = part % used
        part += skipped
        query = first + tl.arange(0, TILE)
        real = query < count * GROUP
        position = length - count + query // GROUP  # [TILE]
        i = tl.arange(0, HEAD_PADDED)
        inside = i < HEAD_DIM
        token, head = (begin + query // GROUP).to(tl.int64), kv_head * GROUP + query % GROUP
        from_q = q + (token * q_stride + head * HEAD_DIM)[:, None] + i[None, :]
        queries = tl.load(from_q, mask=real[:, None] & inside[None, :], other=0.0)

        # Some query of the tile sees each of the keys [start, end) in the split.
        start = tl.maximum(length - count + first // GROUP - window + 1, 0)
        end = tl.minimum(length - count + tl.minimum((first + TILE - 1) // GROUP + 1, count), (part + 1) * size)
        row_table = block_tables + row.to(tl.int64) * table_stride
        # Key tiles begin at multiples of BLOCK_N, wherever the window begins.
        lowest = tl.maximum(start // BLOCK_N * BLOCK_N, part * size)
        seen_by_all = end if DECODE else tl.minimum(length - count + first // GROUP + 1, end)
        if UNIT == 0:
            best, divisor, total = attend_keys(
                queries, k_cache, v_cache, row_table, lowest, seen_by_all, start, end, position, window, scale, kv_head,
                NARROW, WINDOWED, DECODE, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE, BLOCK_N,
            )  # fmt: skip
            best += tl.log2(divisor)
        else:
            best = tl.full([TILE], float("-inf"), tl.float32)
            mass = tl.zeros([TILE], tl.float32)
            total = tl.zeros([TILE, HEAD_PADDED], tl.float32)
            for unit in tl.range(lowest // UNIT * UNIT, end, UNIT):
                begin, until = tl.maximum(lowest, unit), tl.minimum(end, unit + UNIT)
                own_best, own_mass, own_total = attend_keys(
                    queries, k_cache, v_cache, row_table, begin, tl.minimum(seen_by_all, until), start, until, position,
                    window, scale, kv_head, NARROW, WINDOWED, DECODE, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE,
                    TILE, BLOCK_N,
                )  # fmt: skip
                best, mass, total = merge(best, mass, total, own_best + tl.log2(own_mass), own_total)
            if splits == 1:
                total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        stored = real[:, None] & inside[None, :]
        if splits == 1:
            cell = token * (NUM_KV_HEADS * GROUP) + head
            tl.store(out + cell[:, None] * HEAD_DIM + i[None, :], total.to(out.dtype.element_ty), mask=stored)
        else:
            before = tl.load(sums + PARTIALS * (num_rows + 1) + row)
            partial = (before + query // GROUP * splits + part).to(tl.int64)
            cell = partial * (NUM_KV_HEADS * GROUP) + head
            tl.store(lse + cell, best, mask=real)
            tl.store(parts + cell[:, None] * HEAD_DIM + i[None, :], total, mask=stored)


_KEY = ["HEAD_DIM", "GROUP", "BLOCK_SIZE", "WINDOWED"]
attend_decodes = tuned(DECODE_CONFIGS, _KEY)(attend)
"""For decodes; TILE holds the queries of one token."""
attend_chunks = tuned(CHUNK_CONFIGS, _KEY)(attend)
"""For chunks; their items depend on the TILE that tuning chose."""
attend_invariantly, attend_wide_heads_invariantly = (
    fixed(configs, _KEY)(attend) for configs in (INVARIANT_CONFIGS, WIDE_INVARIANT_CONFIGS)
)
"""For rows of any kind, in one order of sums; their UNIT is that of kernels.triton.attention.splits."""
