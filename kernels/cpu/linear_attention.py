"""Owns linear attention in torch's operators: decode rows all at once, and chunks by matrix products.
Never loops over a chunk's tokens, and never reads a slot that no row of the step has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forward import LinearHeads
from kernels.reference import delta_inputs, log_decay
from kernels.rows.step import StateRows

PIECE = 64
"""Tokens per triangular system. The system's work grows with their square, the state's linearly."""


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows) -> Tensor:
    """See kernels.reference.causal_conv. x: [num_tokens, channels], weight: [channels, kernel], state: [slots,
    kernel - 1, channels].

    Decode rows and chunks add in the same order, so that chunk boundaries do not change a sum.
    """
    weights = weight.float().unbind(1)
    parts = []
    if decodes := rows.num_decode:
        index = rows.index[:decodes]
        before = state.index_select(0, index)
        inputs = torch.cat((before, x[:decodes].unsqueeze(1)), dim=1)  # [decodes, kernel, channels]
        parts.append(_weighted(inputs.float().unbind(1), weights))
        state.index_copy_(0, index, inputs[:, 1:])
    for row, tokens in _chunks(rows):
        before = state[rows.slots[row]] if rows.contexts[row] else torch.zeros_like(state[0])
        sequence = torch.cat((before, x[tokens]))  # [kernel - 1 + count, channels]
        wide, count = sequence.float(), rows.counts[row]
        parts.append(_weighted([wide[lag : lag + count] for lag in range(len(weights))], weights))
        state[rows.slots[row]] = sequence[count:]
    total = torch.cat(parts) if len(parts) > 1 else parts[0]
    return F.silu(total, inplace=True).to(x.dtype)


def _weighted(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum inputs * weights. inputs: each [tokens, channels] float32, oldest first."""
    total = inputs[0] * weights[0]
    for shifted, weight in zip(inputs[1:], weights[1:], strict=True):
        total.addcmul_(shifted, weight)
    return total


def delta_rule(
    qkv: Tensor,
    strength: Tensor,
    step: Tensor,
    rates: tuple[Tensor, Tensor],
    heads: LinearHeads,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """See kernels.reference.delta_rule."""
    q, k, v = delta_inputs(qkv, heads)
    decay, strength = log_decay(step, rates), strength.float().sigmoid()
    out = torch.empty_like(v)
    if decodes := rows.num_decode:
        order, places = _in_slot_order(rows, decodes)
        read, states = one_step(q[order], k[order], v[order], decay[order], strength[order], state[places])
        out.index_copy_(0, order, read)
        if isinstance(places, Tensor):
            state.index_copy_(0, places, states)
    for row, tokens in _chunks(rows):
        before = state[rows.slots[row]] if rows.contexts[row] else torch.zeros_like(state[0])
        read, after = by_pieces(q[tokens], k[tokens], v[tokens], decay[tokens], strength[tokens], before)
        out[tokens], state[rows.slots[row]] = read, after
    return out.flatten(1).to(qkv.dtype)


def one_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Process one token of each of several requests; return (what is read after it, the new states). Writes to `state`.

    q, k: [rows, heads, key_dim], v: [rows, heads, value_dim], log_decay and strength: [rows, heads], state: [rows,
    heads, key_dim, value_dim].
    """
    decay = log_decay.exp().unsqueeze(-1)
    of_keys, of_queries = (torch.stack((k, q), dim=2) @ state).unbind(2)  # each [rows, heads, value_dim], before decay
    written = strength.unsqueeze(-1) * (v - decay * of_keys)
    flat = state.mul_(decay.unsqueeze(-1)).view(-1, *state.shape[2:])
    flat.baddbmm_(k.flatten(0, 1).unsqueeze(2), written.flatten(0, 1).unsqueeze(1))
    # Reads the new state at q without another pass: the decayed old read, plus what was written times q . k.
    return decay * of_queries + (q * k).sum(dim=-1, keepdim=True) * written, state


def by_pieces(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, piece: int = PIECE
) -> tuple[Tensor, Tensor]:
    """Process one request's tokens, `piece` at a time; shapes and meaning are those of kernels.reference.recur.

    Token t writes u_t = strength_t (v_t - what the state before it reads at k_t). With L the cumulative sums of
    log_decay, that state is exp(L_t) S + sum over i < t of exp(L_t - L_i) k_i u_i^T, so that all u of a piece solve one
    lower triangular system.
    """
    by_head = [part.transpose(0, 1) for part in (q, k, v, log_decay, strength)]
    read = []
    for first in range(0, len(q), piece):
        found, state = _piece(state, *(part[:, first : first + piece] for part in by_head))
        read.append(found.transpose(0, 1))
    return torch.cat(read), state


def _piece(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """`by_pieces` for one piece, with heads first: q, k: [heads, count, key_dim], log_decay: [heads, count]."""
    sums = log_decay.cumsum(dim=1)
    future = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: exponents of future tokens are positive, and may overflow.
    decay = (sums.unsqueeze(2) - sums.unsqueeze(1)).masked_fill(future, -torch.inf).exp()  # [heads, count, count]
    from_state = sums.exp().unsqueeze(2)  # [heads, count, 1]
    strength = strength.unsqueeze(2)
    system = strength * (k @ k.transpose(1, 2)) * decay  # the solver takes its diagonal to be ones
    wanted = strength * (v - from_state * (k @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = from_state * (q @ state) + ((q @ k.transpose(1, 2)) * decay) @ written
    to_end = (sums[:, -1:] - sums).exp().unsqueeze(2)
    after = state * sums[:, -1].exp()[:, None, None] + (k * to_end).transpose(1, 2) @ written
    return read, after


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), the norm over each head. x, gate: [num_tokens, heads * size], weight: [size]."""
    by_head = x.float().reshape(len(x), -1, len(weight))
    normed = F.rms_norm(by_head, weight.shape, weight.float(), eps).flatten(1)
    return normed.mul_(F.silu(gate.float())).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor, other: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate), plus `other`. x, other: [num_tokens, size], gate: as x, or [num_tokens, 1]."""
    gated = x.float() * gate.float().sigmoid()
    return (gated if other is None else gated.add_(other)).to(x.dtype)


def _chunks(rows: StateRows) -> Iterator[tuple[int, slice]]:
    """Yield (row, its tokens) for the rows after the decode rows."""
    first = rows.num_decode
    for row in range(rows.num_decode, len(rows.counts)):
        yield row, slice(first, first + rows.counts[row])
        first += rows.counts[row]


def _in_slot_order(rows: StateRows, decodes: int) -> tuple[Tensor, slice | Tensor]:
    """Return (the decode rows in the order of their slots, these slots). Adjacent slots, as those of all running
    requests are, come as a slice, so that states are updated in place: copying them costs more than the step."""
    assert all(rows.contexts[:decodes]), "a decode row follows a prompt"
    slots = rows.slots[:decodes]
    order = sorted(range(decodes), key=slots.__getitem__)
    first, last = slots[order[0]], slots[order[-1]]
    index = torch.tensor(order, device=rows.index.device)
    return index, slice(first, last + 1) if last - first + 1 == decodes else rows.index[index]
