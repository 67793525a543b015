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
def _allowed(own, allowed, i, inside):
    """Return one row's own logits of tokens `i` in float32; -inf where `allowed`, None or a bit set, lacks them."""
    value = tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
    if allowed is not None:
        value = tl.where(_is_in(allowed, i, inside), value, float("-inf"))
    return value


@triton.jit
def _penalized(value, i, inside, row, counts, slots, latest, width, repetitions, frequencies, presences, vocab):
    """Return the logits of tokens `i` with the row's penalties, which need how often each token occurs in its text."""
    slot = tl.load(slots + row)
    if slot >= 0:
        count = tl.load(counts + slot * vocab + i, mask=inside, other=0)
        for n in tl.range(0, width):
            count += tl.where(i == tl.load(latest + row * width + n), 2, 0)
        repetition, times = tl.load(repetitions + row).to(tl.float32), (count >> 1).to(tl.float64)
        penalty = (times * tl.load(frequencies + row) + tl.load(presences + row)).to(tl.float32)
        repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(count > 0, repeated, value)
        value = value - tl.where(count > 1, penalty, 0.0)
    return value


# Slices of few copies, which begin anywhere: alignment must not choose between compiled kernels.
_TOKENS = ["slots", "latest", "width", "repetitions", "frequencies", "presences"]


@triton.jit(do_not_specialize=_TOKENS, do_not_specialize_on_alignment=_TOKENS)
def _copy(
    own,
    stride,
    allowed,
    counts,
    slots,
    latest,
    width,
    repetitions,
    frequencies,
    presences,
    controlled,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    """Copy the allowed logits, with penalties. own: [rows, vocab] of any type; controlled: [rows, vocab] float32;
    allowed: None, or [rows, num_words]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab
    words = allowed
    if allowed is not None:
        words = allowed + row * num_words
    value = _allowed(own + row * stride, words, i, inside)
    value = _penalized(value, i, inside, row, counts, slots, latest, width, repetitions, frequencies, presences, vocab)
    tl.store(controlled + row * vocab + i, value, mask=inside)


_EDITS = ["biased_begins", "biased", "biases", "banned_begins", "banned", "afters"]


@triton.jit(do_not_specialize=_TOKENS, do_not_specialize_on_alignment=[*_TOKENS, *_EDITS])
def _edit(
    own,
    stride,
    allowed,
    counts,
    slots,
    latest,
    width,
    repetitions,
    frequencies,
    presences,
    biased_begins,
    biased,
    biases,
    banned_begins,
    banned,
    afters,
    controlled,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    """One row per program: anew the logits that have a bias, since it comes before penalties, and then the bans.

    A row's biased tokens are distinct, so that no two threads change the same logit.
    """
    row = tl.program_id(0).to(tl.int64)
    words = allowed
    if allowed is not None:
        words = allowed + row * num_words
    end = tl.load(biased_begins + row + 1)
    for first in tl.range(tl.load(biased_begins + row), end, BLOCK):
        edit = first + tl.arange(0, BLOCK)
        inside = edit < end
        i = tl.load(biased + edit, mask=inside, other=0)
        value = _allowed(own + row * stride, words, i, inside) + tl.load(biases + edit, mask=inside, other=0.0)
        value = _penalized(
            value, i, inside, row, counts, slots, latest, width, repetitions, frequencies, presences, vocab
        )
        tl.store(controlled + row * vocab + i, value, mask=inside)
    tl.debug_barrier()  # other threads of the program may have stored what is banned next
    newest = tl.load(latest + row * width)
    end = tl.load(banned_begins + row + 1)
    for first in tl.range(tl.load(banned_begins + row), end, BLOCK):
        edit = first + tl.arange(0, BLOCK)
        after = tl.load(afters + edit, mask=edit < end, other=-2)
        i = tl.load(banned + edit, mask=edit < end, other=0)
        applies = (edit < end) & ((after < 0) | (after == newest))
        tl.store(controlled + row * vocab + i, float("-inf"), mask=applies)


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
    controls = rows.controls
    if controls is None:
        return logits
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device) if out is None else out
    pieces, words = triton.cdiv(vocab, BLOCK), 0 if controls.allowed is None else controls.allowed.shape[1]
    tokens, sizes = controls.tokens, (vocab, words, BLOCK)
    own = (logits, logits.stride(0), controls.allowed)
    seen = (tokens.counts, tokens.slots, tokens.latest, tokens.latest.shape[1], *controls.penalties)
    # A product fused with the sum after it would round once, where the reference rounds twice.
    _copy[(num_rows, pieces)](*own, *seen, out, *sizes, enable_fp_fusion=False)
    if controls.edits is not None:
        _edit[(num_rows,)](*own, *seen, *controls.edits, out, *sizes, enable_fp_fusion=False)
    if (within := controls.within) is not None:
        words = within.shape[1]
        left = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
        _look[(num_rows, pieces)](within, out, left, vocab, words, BLOCK)
        sizes = (vocab, words, BLOCK)
        _limit[(num_rows, pieces)](logits, logits.stride(0), within, out, left, *sizes, padded(pieces))
    return out
