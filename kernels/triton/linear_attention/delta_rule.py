"""Owns the gated delta rule on a GPU: one step of many requests, and chunks piece by piece (arXiv 2412.06464).
Never touches a row without a slot (-1), and never reads a tensor back: the host knows what sizes a launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forward import LinearHeads
from kernels.rows.device import DeviceStateRows, states_on_device
from kernels.rows.step import StateRows
from kernels.triton.shared.launch import padded, split_dot
from kernels.triton.shared.tiles import find_row

PIECE = 32
"""Tokens of a chunk per triangular system. Inverting it takes as many steps, each over the whole system."""
VALUES_AT_A_TIME = 32


@triton.jit
def _decay_and_strength(strength, step, rate, bias, at_strength, at_step, head, real):
    """Return the tokens' (log decay, write strength) in float32; (0, 0) where there is no token."""
    stepped = tl.load(step + at_step, mask=real, other=0.0).to(tl.float32) + tl.load(bias + head)
    softplus = tl.maximum(stepped, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(stepped)))
    written = tl.sigmoid(tl.load(strength + at_strength, mask=real, other=0.0).to(tl.float32))
    return tl.where(real, tl.load(rate + head) * softplus, 0.0), tl.where(real, written, 0.0)


@triton.jit(do_not_specialize_on_alignment=["begins", "lengths", "slots"])  # as attend's
def _one_step(
    qkv,
    strength,
    step,
    rate,
    bias,
    state,
    out,
    begins,
    lengths,
    slots,
    qkv_stride,
    strength_stride,
    step_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One token's step, for TILE values of one head. Rows with more tokens are left to `_scan`."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(begins + row).to(tl.int64)
    if (slot < 0) | (tl.load(begins + row + 1) - token != 1):
        return
    i = tl.arange(0, KEY_PADDED)
    j = tl.program_id(2) * TILE + tl.arange(0, TILE)
    of_keys, of_values = i < KEY_DIM, j < VALUE_DIM
    mine = qkv + token * qkv_stride + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
    q = tl.load(mine, mask=of_keys, other=0.0).to(tl.float32)
    k = tl.load(mine + KEY_HEADS * KEY_DIM, mask=of_keys, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    values = qkv + token * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = tl.load(values, mask=of_values, other=0.0).to(tl.float32)
    at_strength, at_step = token * strength_stride + head, token * step_stride + head
    decay, written = _decay_and_strength(strength, step, rate, bias, at_strength, at_step, head, token >= 0)

    cells = state + ((slot * VALUE_HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    real = of_keys[:, None] & of_values[None, :]
    follows = tl.load(lengths + row) > 1
    matrix = tl.load(cells, mask=real & follows, other=0.0) * tl.exp(decay)
    error = v - tl.sum(matrix * k[:, None], axis=0)
    matrix += k[:, None] * (written * error)[None, :]
    tl.store(cells, matrix, mask=real)
    read = tl.sum(matrix * q[:, None], axis=0)
    to = out + (token * VALUE_HEADS + head) * VALUE_DIM + j
    tl.store(to, read.to(out.dtype.element_ty), mask=of_values)


@triton.jit
def _keys(x, token, token_stride, real, i, of_keys):
    """Load L2-normalised keys or queries. x: points to the head's first. # [PIECE, KEY_PADDED]"""
    found = tl.load(x + token[:, None] * token_stride + i[None, :], mask=real[:, None] & of_keys[None, :], other=0.0)
    found = found.to(tl.float32)
    return found * tl.rsqrt(tl.sum(found * found, axis=1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["begins", "slots"])
def _invert(
    qkv,
    strength,
    step,
    rate,
    bias,
    inverses,
    begins,
    slots,
    num_rows,
    qkv_stride,
    strength_stride,
    step_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Invert one piece's system by forward substitution. inverses: [num_tokens, VALUE_HEADS, PIECE] float32"""
    head = tl.program_id(1)
    row, first_piece = find_row(begins, 0, num_rows, tl.program_id(0), 1, PIECE)
    begin = tl.load(begins + row).to(tl.int64)
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    first = (tl.program_id(0) - first_piece) * PIECE
    if (tl.load(slots + row) < 0) | (count <= 1) | (first >= count):
        return
    n, i = tl.arange(0, PIECE), tl.arange(0, KEY_PADDED)
    real = first + n < count
    token = begin + first + n
    of_head = qkv + (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM
    k = _keys(of_head, token, qkv_stride, real, i, i < KEY_DIM)
    at_strength, at_step = token * strength_stride + head, token * step_stride + head
    decay, written = _decay_and_strength(strength, step, rate, bias, at_strength, at_step, head, real)
    sums = tl.cumsum(decay, axis=0)
    below = n[:, None] > n[None, :]
    fades = tl.exp(tl.where(below, sums[:, None] - sums[None, :], float("-inf")))
    system = split_dot(k, tl.trans(k), tl.zeros([PIECE, PIECE], tl.float32)) * fades * written[:, None]
    inverse = tl.where(n[:, None] == n[None, :], 1.0, 0.0)
    for line in tl.range(1, PIECE):
        of_line = tl.sum(tl.where(n[:, None] == line, system, 0.0), axis=0)  # [PIECE]: 0 from `line` on
        change = tl.sum(of_line[:, None] * inverse, axis=0)
        inverse -= tl.where(n[:, None] == line, change[None, :], 0.0)
    to = inverses + (token * VALUE_HEADS + head)[:, None] * PIECE + n[None, :]
    tl.store(to, inverse, mask=real[:, None])


@triton.jit(do_not_specialize_on_alignment=["begins", "lengths", "slots"])
def _scan(
    qkv,
    strength,
    step,
    rate,
    bias,
    inverses,
    state,
    out,
    begins,
    lengths,
    slots,
    qkv_stride,
    strength_stride,
    step_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """All pieces of one row, for TILE values of one head; see kernels.cpu.linear_attention.by_pieces."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(begins + row).to(tl.int64)
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    if (slot < 0) | (count <= 1):
        return
    n, i = tl.arange(0, PIECE), tl.arange(0, KEY_PADDED)
    j = tl.program_id(2) * TILE + tl.arange(0, TILE)
    of_keys, of_values = i < KEY_DIM, j < VALUE_DIM
    cells = state + ((slot * VALUE_HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    inside = of_keys[:, None] & of_values[None, :]
    matrix = tl.load(cells, mask=inside & (tl.load(lengths + row) > count), other=0.0)
    of_head = qkv + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    reached = n[:, None] >= n[None, :]
    for first in tl.range(0, count, PIECE):
        real = first + n < count
        token = begin + first + n
        q = _keys(of_head, token, qkv_stride, real, i, of_keys) * scale
        k = _keys(of_head + KEY_HEADS * KEY_DIM, token, qkv_stride, real, i, of_keys)
        values = qkv + token[:, None] * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
        v = tl.load(values, mask=real[:, None] & of_values[None, :], other=0.0).to(tl.float32)
        at_strength, at_step = token * strength_stride + head, token * step_stride + head
        decay, strengths = _decay_and_strength(strength, step, rate, bias, at_strength, at_step, head, real)
        sums, whole = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        from_state = tl.exp(sums)[:, None]
        wanted = strengths[:, None] * (v - from_state * split_dot(k, matrix, tl.zeros([PIECE, TILE], tl.float32)))
        at = inverses + (token * VALUE_HEADS + head)[:, None] * PIECE + n[None, :]
        inverse = tl.load(at, mask=real[:, None], other=0.0)
        written = split_dot(inverse, wanted, tl.zeros([PIECE, TILE], tl.float32))
        fades = tl.exp(tl.where(reached, sums[:, None] - sums[None, :], float("-inf")))
        scores = split_dot(q, tl.trans(k), tl.zeros([PIECE, PIECE], tl.float32)) * fades
        read = split_dot(scores, written, from_state * split_dot(q, matrix, tl.zeros([PIECE, TILE], tl.float32)))
        to = out + (token * VALUE_HEADS + head)[:, None] * VALUE_DIM + j[None, :]
        tl.store(to, read.to(out.dtype.element_ty), mask=real[:, None] & of_values[None, :])
        kept = k * tl.exp(whole - sums)[:, None]
        matrix = split_dot(tl.trans(kept), written, matrix * tl.exp(whole))
    tl.store(cells, matrix, mask=inside)


def delta_rule(
    qkv: Tensor,
    strength: Tensor,
    step: Tensor,
    rates: tuple[Tensor, Tensor],
    heads: LinearHeads,
    state: Tensor,
    rows: StateRows,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See kernels.reference.delta_rule. A row of one token takes one step, decode or not; others are chunks."""
    there = rows if isinstance(rows, DeviceStateRows) else states_on_device(rows)
    qkv, strength, step = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, strength, step))
    size = (len(qkv), heads.value_size)
    out = torch.empty(size, dtype=qkv.dtype, device=qkv.device) if out is None else out
    given, strides = (qkv, strength, step, *rates), (qkv.stride(0), strength.stride(0), step.stride(0))
    numbers, scale = (there.first_tokens, there.lengths, there.index), heads.key_dim**-0.5
    shape = (heads.num_key_heads, heads.num_value_heads, heads.key_dim)
    key_padded = padded(heads.key_dim, least=16)
    tile = min(padded(heads.value_dim, least=16), VALUES_AT_A_TIME)
    grid = (len(there.lengths), heads.num_value_heads, triton.cdiv(heads.value_dim, tile))
    _one_step[grid](*given, state, out, *numbers, *strides, scale, *shape, heads.value_dim, key_padded, tile)
    if there.max_count > 1:
        inverses = torch.empty(len(qkv), heads.num_value_heads, PIECE, device=qkv.device)
        num_rows = len(there.lengths)
        # Not rows times the longest row's pieces: in a captured step `max_count` is all of its tokens.
        pieces = (len(qkv) // PIECE + num_rows, heads.num_value_heads)
        of_rows = (there.first_tokens, there.index, num_rows)
        _invert[pieces](*given, inverses, *of_rows, *strides, *shape, key_padded, PIECE, num_warps=8)
        sizes = (*shape, heads.value_dim, key_padded, PIECE, tile)
        # One stage: with buffers to load ahead, the loop would need more shared memory than some GPUs have.
        # Eight warps: with four, more of the state and the products is spilled.
        _scan[grid](*given, inverses, state, out, *numbers, *strides, scale, *sizes, num_warps=8, num_stages=1)
    return out
