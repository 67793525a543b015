"""Owns the changes to logits before a token is chosen: allowed tokens, bias, penalties, bans, grammars.
Never changes the model's own logits, and rounds each operation as `kernels.reference.control_logits` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.rows import SampledRows
from kernels.triton.shared.launch import padded

BLOCK = 1024


@triton.jit
def _is_in(words, i, inside):
    """Return whether tokens `i` are in a bit set: token t is bit t % 32 of word t // 32."""
    return ((tl.load(words + i // 32, mask=inside, other=0) >> (i % 32)) & 1) != 0


@triton.jit
def _copy(own, stride, allowed, controlled, vocab, num_words, BLOCK: tl.constexpr):
    """Copy the allowed logits. own: [rows, vocab] of any type; controlled: [rows, vocab] float32; allowed: None, or
    [rows, num_words]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab
    value = tl.load(own + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    if allowed is not None:
        value = tl.where(_is_in(allowed + row * num_words, i, inside), value, float("-inf"))
    tl.store(controlled + row * vocab + i, value, mask=inside)


# Slices of two copies, which begin anywhere: alignment must not choose between compiled kernels.
@triton.jit(do_not_specialize_on_alignment=["begins", "tokens", "biases", "repetitions", "penalties"])
def _edit(controlled, begins, tokens, biases, repetitions, penalties, vocab, BLOCK: tl.constexpr):
    """One row per program. A row's edits have distinct tokens, so that no two threads change the same logit."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(begins + row + 1)
    for first in tl.range(tl.load(begins + row), end, BLOCK):
        edit = first + tl.arange(0, BLOCK)
        inside = edit < end
        at = controlled + row * vocab + tl.load(tokens + edit, mask=inside, other=0)
        value = tl.load(at, mask=inside, other=0.0) + tl.load(biases + edit, mask=inside, other=0.0)
        repetition = tl.load(repetitions + edit, mask=inside, other=1.0)
        value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        tl.store(at, value - tl.load(penalties + edit, mask=inside, other=0.0), mask=inside)


@triton.jit
def _look(within, controlled, left, vocab, num_words, BLOCK: tl.constexpr):
    """Count, in left [rows, pieces] int32, the tokens of each piece that `within` allows and the controls left."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = piece * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(controlled + row * vocab + i, mask=i < vocab, other=float("-inf"))
    # NaN counts as something left: the row must fail, not be sampled from.
    found = _is_in(within + row * num_words, i, i < vocab) & (value != float("-inf"))
    tl.store(left + row * tl.num_programs(1) + piece, tl.sum(found.to(tl.int32), axis=0))


@triton.jit
def _limit(own, stride, within, controlled, left, vocab, num_words, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Limit rows to `within`. A row that has none of its tokens left gets the model's own logits for all of them."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, pieces = tl.arange(0, PIECES), tl.num_programs(1)
    found = tl.sum(tl.load(left + row * pieces + n, mask=n < pieces, other=0), axis=0)
    i = piece * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(controlled + row * vocab + i, mask=i < vocab, other=0.0)
    given = tl.load(own + row * stride + i, mask=(i < vocab) & (found == 0), other=0.0).to(tl.float32)
    allowed = _is_in(within + row * num_words, i, i < vocab)
    value = tl.where(allowed, tl.where(found == 0, given, kept), float("-inf"))
    tl.store(controlled + row * vocab + i, value, mask=i < vocab)


def control_logits(logits: Tensor, rows: SampledRows, *, out: Tensor | None = None) -> Tensor:
    """Apply the rows' controls to a float32 copy of `logits` [rows, vocab], rows contiguous. Without controls, return
    `logits` itself."""
    if rows.edits is None and rows.allowed is None and rows.within is None:
        return logits
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device) if out is None else out
    words = 0 if rows.allowed is None else rows.allowed.shape[1]
    pieces = triton.cdiv(vocab, BLOCK)
    _copy[(num_rows, pieces)](logits, logits.stride(0), rows.allowed, out, vocab, words, BLOCK)
    if (edits := rows.edits) is not None:
        # A product fused with the subtraction after it would round once, where the reference rounds twice.
        _edit[(num_rows,)](
            out, edits.begins, edits.tokens, edits.biases, edits.repetitions, edits.penalties, vocab, BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    if rows.within is not None:
        words = rows.within.shape[1]
        left = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
        _look[(num_rows, pieces)](rows.within, out, left, vocab, words, BLOCK)
        sizes = (vocab, words, BLOCK, padded(pieces))
        _limit[(num_rows, pieces)](logits, logits.stride(0), rows.within, out, left, *sizes)
    return out
