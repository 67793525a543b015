"""Owns the definition of correct: every operation in plain torch, float32 inside, one row at a time.
Never tries to be fast, and imports nothing but torch; every other backend is compared with this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of one step as attention sees them. Their tokens lie one after another in the step's tensors.

        rows     | decode 0 | decode 1 | ... | chunk 0      | chunk 1 |
        tokens   | 1        | 1        | ... | counts[r]    | ...     |

    Row r's tokens sit at positions [contexts[r], contexts[r] + counts[r]) of its request. What a row is, is said by
    `num_decode`: a chunk of one token is not a decode.
    """

    num_decode: int
    contexts: tuple[int, ...]
    """Tokens of the request whose K and V were in the cache before this step."""
    counts: tuple[int, ...]
    block_tables: Tensor
    """[num_rows, max_blocks] int64, each row padded with any valid block."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def slots(self, row: int) -> Tensor:
        """Cache slots of all of a row's tokens, this step's included: # [contexts[row] + counts[row]]"""
        positions = torch.arange(self.contexts[row] + self.counts[row])
        return self.block_tables[row, positions // self.block_size] * self.block_size + positions % self.block_size


def round_weight(weight: Tensor) -> Tensor:
    """Each output's weights to the nearest multiple of its largest magnitude / 127. [outputs, inputs], in float64."""
    unit = weight.double().abs().amax(dim=1, keepdim=True) / 127
    return (weight.double() / unit.clamp(min=torch.finfo(torch.float64).tiny)).round() * unit


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis. x: [..., size], weight: [size]."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(sum) in x's type, sum in float32) of sum = x + residual; the residual is float32.

    A residual in bfloat16 rounds after every layer: its error grows with depth and moves close argmaxes.
    """
    total = x.float() + residual
    return rms_norm(total, weight, eps).to(x.dtype), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2). x: [num_tokens, heads, head_dim], cos and sin: [num_tokens, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, head_dim / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store token t's K and V in slot slots[t].

    k, v: [num_tokens, kv_heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim]; slots: [num_tokens].
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[token]
        v_cache[slot // block_size, slot % block_size] = v[token]


def prepare_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> PagedRows:
    """What `attention` needs besides tensors; the reference builds nothing ahead."""
    return rows


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: PagedRows, scale: float) -> Tensor:
    """softmax(q k^T * scale) v over each row's cached tokens, causal. # [num_tokens, heads, head_dim]

    q: [num_tokens, heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim], this step's K and V written.
    Query head h reads KV head h // (heads / kv_heads).
    """
    out = torch.empty_like(q)
    first = 0
    for row, (context, count) in enumerate(zip(rows.contexts, rows.counts, strict=True)):
        slots = rows.slots(row)
        k = k_cache.flatten(0, 1)[slots].float()  # [context + count, kv_heads, head_dim]
        v = v_cache.flatten(0, 1)[slots].float()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count].float(), k) * scale
        future = torch.arange(context + count) > context + torch.arange(count).unsqueeze(1)  # [count, context + count]
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        first += count
    return out


def control_logits(
    logits: Tensor,
    *,
    allowed: Sequence[int] | None = None,
    bias: Sequence[tuple[int, float]] = (),
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    bad_words: Sequence[Sequence[int]] = (),
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> Tensor:
    """One row of logits [vocab_size], float32, as changed before a token is chosen from it.

    Repetition: Keskar et al., 2019 (CTRL), section 4.1, with the sign of the logit taken into account. Frequency and
    presence: OpenAI's API reference.
    """
    logits = logits.clone()
    for token in range(len(logits)):
        if allowed is not None and token not in allowed:
            logits[token] = -torch.inf
        for biased, amount in bias:
            logits[token] += amount if biased == token else 0.0
        if token in prompt or token in answer:
            positive = bool(logits[token] > 0)
            logits[token] = logits[token] / repetition_penalty if positive else logits[token] * repetition_penalty
        times = list(answer).count(token)
        logits[token] -= times * frequency_penalty + (presence_penalty if times else 0.0)
        for word in bad_words:
            *before, last = word
            if last == token and list(answer[len(answer) - len(before) :]) == before:
                logits[token] = -torch.inf
    return logits


def keep_within(logits: Tensor, own: Tensor, allowed: Sequence[int]) -> Tensor:
    """One row of logits [vocab_size], controlled and with banned tokens at -inf, as limited to what a grammar allows.

    The grammar has the last word: where nothing allowed is left, the allowed tokens have the model's `own` logits.
    """
    kept = torch.full_like(logits, -torch.inf)
    source = own if all(logits[token] == -torch.inf for token in allowed) else logits
    for token in allowed:
        kept[token] = source[token]
    return kept


def sample(
    logits: Tensor,
    uniform: float,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    banned: Sequence[int] = (),
) -> int:
    """The token of one row of logits [vocab_size]: ban, temperature, top-k, top-p, min-p, then inverse CDF.

    top-p counts probabilities renormalised after top-k; min-p is relative to the most likely token. Ties go to the
    lower token id. The CDF runs in vocabulary order: the token is the first whose cumulative mass exceeds `uniform`.
    """
    wide = logits.double().clone()
    wide[list(banned)] = -torch.inf
    if temperature == 0:
        return int(wide.argmax())
    order = sorted(range(len(wide)), key=lambda token: (-wide[token].item(), token))
    if top_k:
        order = order[:top_k]
    mass = torch.exp((wide - wide[order[0]]) / temperature)
    kept: list[int] = []
    before, total = 0.0, mass[order].sum().item()
    for token in order:
        if before < top_p * total or not kept:
            kept.append(token)
        before += mass[token].item()
    kept = sorted(token for token in kept if mass[token] > 0 and mass[token] >= min_p)
    target, cumulative = uniform * mass[kept].sum().item(), 0.0
    for token in kept:
        cumulative += mass[token].item()
        if cumulative > target:
            return token
    return kept[-1]
