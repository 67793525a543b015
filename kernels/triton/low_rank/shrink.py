"""Owns the first product of LoRA adapters on a GPU: from a token's inputs to its adapter's ranks, in parts of the sum.
Never adds the parts up, which takes an order: whoever reads them does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows.adapter_tokens import TILE, AdapterTokens
from kernels.triton.shared.launch import NO_FUSION, dot, fixed, padded, tuned

SPLIT = 1024
"""Inputs whose products a program sums: few ranks and few tiles leave most of a GPU idle unless the inputs are split.
Always at the same places, so that a token's sum has one order whatever is in the batch."""
MOST_RANKS = 64
"""Ranks of one program."""

CONFIGS = [
    triton.Config({"BLOCK_K": inputs}, num_warps=warps, num_stages=stages)
    for inputs, warps, stages in ((64, 8, 4), (128, 4, 3), (128, 8, 3))
]


@triton.jit
def tile_of(order, tiles, number, TILE: tl.constexpr):
    """Return a tile's (places in the order, which of them are real, tokens), each int64."""
    place = tl.load(tiles + 3 * number + 1) + tl.arange(0, TILE)
    real = place < tl.load(tiles + 3 * number + 2)
    return place, real, tl.load(order + place, mask=real, other=0)


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])  # views into the step's packed integers
def _shrink(
    x,
    a,
    order,
    tiles,
    sums,
    x_stride,
    slot_stride,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_R ranks of a tile, summed over SPLIT inputs. a: [slots, RANKS, INPUTS]; sums: [places, SPLITS, RANKS]"""
    number, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * number)
    if slot < 0:
        return
    place, real, token = tile_of(order, tiles, number, TILE)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    of_ranks = r < RANKS
    from_x = x + token[:, None] * x_stride
    from_a = a + slot * slot_stride + r[None, :] * INPUTS
    total = tl.zeros([TILE, BLOCK_R], tl.float32)
    for first in tl.range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, INPUTS), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < INPUTS
        of_x = tl.load(from_x + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        of_a = tl.load(from_a + k[:, None], mask=inside[:, None] & of_ranks[None, :], other=0.0)
        total = dot(of_x, of_a, total)
    to = sums + (place[:, None] * SPLITS + split) * RANKS + r[None, :]
    tl.store(to, total, mask=real[:, None] & of_ranks[None, :])


_KEY = ["INPUTS", "RANKS"]
shrink_tuned = tuned(CONFIGS, _KEY)(_shrink)
shrink_invariantly = fixed(CONFIGS, _KEY)(_shrink)


def shrink(x: Tensor, a: Tensor, tokens: AdapterTokens, *, batch_invariant: bool = False) -> Tensor:
    """Parts of x a^T for each token with an adapter, in the tokens' order. # [num_tokens, splits, ranks] float32

    x: [num_tokens, inputs]; a: [slots, ranks, inputs] in x's type, each slot contiguous. The parts of a token are of
    SPLIT inputs each. Those of places without a token are not written. batch_invariant: the same bits on all GPUs of a
    kind.
    """
    (num_tokens, inputs), ranks = x.shape, a.shape[1]
    splits, block = triton.cdiv(inputs, SPLIT), min(padded(ranks, 16), MOST_RANKS)
    sums = torch.empty(num_tokens, splits, ranks, dtype=torch.float32, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    grid = (len(tokens.tiles), splits, triton.cdiv(ranks, block))
    strides, sizes = (x.stride(0), a.stride(0)), (inputs, ranks, splits, SPLIT, TILE, block)
    launch, how = (shrink_invariantly, NO_FUSION) if batch_invariant else (shrink_tuned, {})
    launch[grid](x, a, tokens.order, tokens.tiles, sums, *strides, *sizes, **how)
    return sums
