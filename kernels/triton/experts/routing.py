"""Owns the choice of experts for each token, and the order in which (token, expert) pairs are then computed.
Never reads a count back: lists are as long as the most uneven choice would need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forward import Routing
from kernels.triton.shared.launch import NO_FUSION, dot, fixed, padded, tuned, warps
from kernels.triton.shared.order_keys import LEAST_KEY, order_key

TOKENS_AT_A_TIME = 32
PAIRS_AT_A_TIME = 1024

CONFIGS = [
    triton.Config({"BLOCK_N": experts, "BLOCK_K": inputs}, num_warps=4, num_stages=stages)
    for experts, inputs, stages in ((32, 32, 3), (16, 64, 3), (32, 64, 2), (64, 32, 3))
]


@triton.jit(do_not_specialize=["num_tokens"])
def _router_logits(
    x,
    router,
    logits,
    num_tokens,
    x_stride,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """TILE tokens and BLOCK_N experts per program, in float32. logits: [num_tokens, EXPERTS]"""
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, of_experts = token < num_tokens, n < EXPERTS
    total = tl.zeros([TILE, BLOCK_N], tl.float32)
    for first in tl.range(0, HIDDEN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < HIDDEN
        a = tl.load(x + token[:, None] * x_stride + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        b = tl.load(router + n[None, :] * HIDDEN + k[:, None], mask=inside[:, None] & of_experts[None, :], other=0.0)
        total = dot(a.to(tl.float32), b, total)
    to = logits + token[:, None] * EXPERTS + n[None, :]
    tl.store(to, total, mask=real[:, None] & of_experts[None, :])


_KEY = ["HIDDEN", "EXPERTS", "TILE"]
router_logits = tuned(CONFIGS, _KEY)(_router_logits)
router_logits_invariantly = fixed(CONFIGS, _KEY)(_router_logits)


@triton.jit
def _choose(
    logits,
    shares,
    chosen,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token per program. Of equal logits the lower expert comes first; NaN comes last, so that every choice is a
    valid expert, whatever the token holds."""
    token = tl.program_id(0).to(tl.int64)
    i, places = tl.arange(0, PADDED), tl.arange(0, PLACES)
    real = i < EXPERTS
    logit = tl.load(logits + token * EXPERTS + i, mask=real, other=float("-inf"))
    number = tl.where(logit == logit, logit, float("-inf"))
    mass = tl.exp(logit - tl.max(number, axis=0))
    share = mass / tl.sum(mass, axis=0)
    key = tl.where(real, order_key(number), LEAST_KEY)
    found, numbers = tl.zeros([PLACES], tl.float32), tl.zeros([PLACES], tl.int32)
    for place in tl.static_range(PER_TOKEN):
        best = tl.argmax(key, axis=0)
        mine = i == best
        found = tl.where(places == place, tl.sum(tl.where(mine, share, 0.0), axis=0), found)
        numbers = tl.where(places == place, best, numbers)
        key = tl.where(mine, LEAST_KEY, key)
    if RENORMALIZE:
        found = found / tl.sum(found, axis=0)
    inside = places < PER_TOKEN
    tl.store(shares + token * PER_TOKEN + places, found, mask=inside)
    tl.store(chosen + token * PER_TOKEN + places, numbers, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort(
    chosen,
    order,
    tiles,
    num_pairs,
    num_tiles,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One expert per program, which counts all experts' pairs and places its own. PADDED: more than EXPERTS."""
    expert = tl.program_id(0)
    i, number = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    counts = tl.zeros([PADDED], tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + i
        counts += tl.histogram(tl.load(chosen + pair, mask=pair < num_pairs, other=EXPERTS), PADDED)
    counts = tl.where(number < EXPERTS, counts, 0)
    needed = (counts + TILE - 1) // TILE
    count = tl.sum(tl.where(number == expert, counts, 0), axis=0)
    begin = tl.sum(tl.where(number < expert, counts, 0), axis=0)
    to = tiles + 3 * tl.sum(tl.where(number < expert, needed, 0), axis=0)
    for first in tl.range(0, count, TILE):
        tl.store(to, expert)
        tl.store(to + 1, begin + first)
        tl.store(to + 2, begin + tl.minimum(first + TILE, count))
        to += 3
    if expert == 0:
        for first in tl.range(tl.sum(needed, axis=0), num_tiles, BLOCK):
            tl.store(tiles + 3 * (first + i), -1, mask=first + i < num_tiles)
    for first in tl.range(0, tl.where(count > 0, num_pairs, 0), BLOCK):
        pair = first + i
        mine = (tl.load(chosen + pair, mask=pair < num_pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, axis=0) - 1, pair, mask=mine > 0)
        begin += tl.sum(mine, axis=0)


def choose_experts(
    x: Tensor, router: Tensor, routing: Routing, *, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (shares in float32, indices of the experts in int32), each [num_tokens, per_token], the largest share
    first; see kernels.reference.route.

    A token's logits are always summed in the same order, so that its experts do not depend on its neighbours.
    batch_invariant: on all GPUs of a kind, too.
    x: [num_tokens, hidden], with any stride between tokens; router: [experts, hidden] float32, contiguous.
    """
    (tokens, hidden), experts = x.shape, len(router)
    logits = torch.empty(tokens, experts, device=x.device)
    shares = torch.empty(tokens, routing.per_token, device=x.device)
    chosen = torch.empty(tokens, routing.per_token, dtype=torch.int32, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(tokens, TOKENS_AT_A_TIME), triton.cdiv(experts, meta["BLOCK_N"])

    launch, how = (router_logits_invariantly, NO_FUSION) if batch_invariant else (router_logits, {})
    launch[grid](x, router, logits, tokens, x.stride(0), hidden, experts, TOKENS_AT_A_TIME, **how)
    sizes = (experts, padded(experts), routing.per_token, padded(routing.per_token), routing.renormalize)
    _choose[(tokens,)](logits, shares, chosen, *sizes, num_warps=warps(experts))
    return shares, chosen


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """Return the most tiles that `num_pairs` can need: each expert that has pairs leaves at most one tile not full."""
    return (num_pairs + min(num_experts, num_pairs) * (tile - 1)) // tile


def sort_pairs(chosen: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return (the pairs sorted by expert, stably, [num_pairs] int32; their tiles, [num_tiles, 3] int32). Pair p is
    token p // per_token and its expert of rank p % per_token.

    A tile is an expert, and the begin and end in the order of at most `tile` of its pairs. Unused tiles have expert -1.
    chosen: [num_tokens, per_token] int32.
    """
    num_pairs = chosen.numel()
    num_tiles = most_tiles(num_pairs, num_experts, tile)
    order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=chosen.device)
    sizes = (num_pairs, num_tiles, num_experts, padded(num_experts + 1), tile, PAIRS_AT_A_TIME)
    _sort[(num_experts,)](chosen, order, tiles, *sizes)
    return order, tiles
