"""Owns mixtures of experts on a GPU: two products for each tile of an expert's pairs, then a sum for each token.
Never waits for the device: launches are sized for the most tiles possible, and programs without a tile end at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forward import Routing
from kernels.triton.experts.routing import choose_experts, sort_pairs
from kernels.triton.shared.launch import dot, tuned

ROWS = 64
"""Pairs of one expert that a program takes. One size for few pairs and many: the order of a pair's sums then does not
depend on its neighbours, and with few pairs loading the expert's weights is the bottleneck anyway."""
BLOCK = 1024

CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": inputs}, num_warps=warps, num_stages=3)
    for outputs, inputs, warps in ((64, 32, 4), (32, 64, 4), (64, 64, 4), (64, 64, 8), (128, 32, 8))
]


@triton.jit
def _tile(order, tiles, number, ROWS: tl.constexpr):
    """Return a tile's (expert, places of its pairs in the order, which of them are real, pairs)."""
    expert = tl.load(tiles + 3 * number)
    place = tl.load(tiles + 3 * number + 1) + tl.arange(0, ROWS)
    real = place < tl.load(tiles + 3 * number + 2)
    return expert.to(tl.int64), place.to(tl.int64), real, tl.load(order + place, mask=real, other=0).to(tl.int64)


@tuned(CONFIGS, key=["HIDDEN", "SIZE", "ROWS"])
@triton.jit
def _gate_up(
    x,
    weight,
    order,
    tiles,
    inner,
    x_stride,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of a tile's silu(gate) * up. weight: [experts, 2 * SIZE, HIDDEN]; inner: [num_pairs, SIZE], in
    `order`"""
    blocks = tl.cdiv(SIZE, BLOCK_N)
    number = tl.program_id(0) // blocks
    if tl.load(tiles + 3 * number) < 0:
        return
    expert, place, real, pair = _tile(order, tiles, number, ROWS)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    of_size = n < SIZE
    from_x = x + (pair // PER_TOKEN)[:, None] * x_stride
    from_gate = weight + (expert * (2 * SIZE) + n)[None, :] * HIDDEN
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in tl.range(0, HIDDEN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < HIDDEN
        a = tl.load(from_x + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        real_weight = inside[:, None] & of_size[None, :]
        gate = dot(a, tl.load(from_gate + k[:, None], mask=real_weight, other=0.0), gate)
        up = dot(a, tl.load(from_gate + SIZE * HIDDEN + k[:, None], mask=real_weight, other=0.0), up)
    to = inner + place[:, None] * SIZE + n[None, :]
    value = (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty)
    tl.store(to, value, mask=real[:, None] & of_size[None, :])


@tuned(CONFIGS, key=["HIDDEN", "SIZE", "ROWS"])
@triton.jit
def _down(
    inner,
    weight,
    order,
    tiles,
    shares,
    parts,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of a tile's output, times its pairs' shares. weight: [experts, HIDDEN, SIZE]; parts: by pair"""
    blocks = tl.cdiv(HIDDEN, BLOCK_N)
    number = tl.program_id(0) // blocks
    if tl.load(tiles + 3 * number) < 0:
        return
    expert, place, real, pair = _tile(order, tiles, number, ROWS)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    of_hidden = n < HIDDEN
    from_weight = weight + (expert * HIDDEN + n)[None, :] * SIZE
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in tl.range(0, SIZE, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < SIZE
        a = tl.load(inner + place[:, None] * SIZE + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        b = tl.load(from_weight + k[:, None], mask=inside[:, None] & of_hidden[None, :], other=0.0)
        total = dot(a, b, total)
    total *= tl.load(shares + pair, mask=real, other=0.0)[:, None]
    to = parts + pair[:, None] * HIDDEN + n[None, :]
    tl.store(to, total.to(parts.dtype.element_ty), mask=real[:, None] & of_hidden[None, :])


@triton.jit
def _add_parts(parts, out, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one token's sum, largest share first. parts: [num_tokens, PER_TOKEN, HIDDEN]"""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        total += tl.load(parts + (token * PER_TOKEN + place) * HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + i, total.to(out.dtype.element_ty), mask=inside)


def experts(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *, out: Tensor | None = None
) -> Tensor:
    """Sum the outputs of each token's experts, weighted by their shares. # [num_tokens, hidden]

    x: [num_tokens, hidden]; router: [experts, hidden] float32; gate_up: [experts, 2 * size, hidden], down: [experts,
    hidden, size], in x's type. Values are rounded to that type between the products and before a token's sum.

    Raises:
        ValueError: a weight is not contiguous.
    """
    for name, tensor in (("router", router), ("gate_up", gate_up), ("down", down)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}: expected a contiguous tensor."
            )
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    (tokens, hidden), size = x.shape, down.shape[2]
    if not tokens:
        return out
    shares, chosen = choose_experts(x, router, routing)
    order, tiles = sort_pairs(chosen, len(router), ROWS)
    num_pairs, num_tiles = len(order), len(tiles)
    inner = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)

    def tiles_by(outputs: int) -> object:
        return lambda meta: (num_tiles * triton.cdiv(outputs, meta["BLOCK_N"]),)

    _gate_up[tiles_by(size)](x, gate_up, order, tiles, inner, x.stride(0), routing.per_token, hidden, size, ROWS)
    _down[tiles_by(hidden)](inner, down, order, tiles, shares, parts, hidden, size, ROWS)
    _add_parts[(tokens, triton.cdiv(hidden, BLOCK))](parts, out, hidden, routing.per_token, BLOCK)
    return out
