"""Owns the definition of correct: every operation in plain torch, computed in float32, one row at a time.
Never tries to be fast, and never calls a backend: every backend is compared with this."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.forward import Linear, LinearHeads, LowRankStack, Routing
from kernels.rows.step import PagedRows, StateRows


def round_weight(weight: Tensor) -> Tensor:
    """Round each output's weights to multiples of its largest magnitude / 127. # [outputs, inputs] float64"""
    unit = weight.double().abs().amax(dim=1, keepdim=True) / 127
    return (weight.double() / unit.clamp(min=torch.finfo(torch.float64).tiny)).round() * unit


def dequantize(linear: Linear) -> Tensor:
    """Return the weights of a narrow `linear`, (q - zero) * scale, in the inputs' order. # [outputs, inputs] float64"""
    stored: Tensor = linear.weight
    if linear.scales is None:
        return stored.double()
    if stored.dtype == torch.uint8:
        stored = torch.stack((stored & 15, stored >> 4), dim=2).flatten(1)
    values, zero = stored.double(), 8.0 if linear.weight.dtype == torch.uint8 else 0.0
    inputs = stored.shape[1]
    groups = torch.arange(inputs, device=stored.device) // (linear.group or inputs)
    values = values - (zero if linear.zeros is None else linear.zeros.double()[:, groups])
    scales: Tensor = linear.scales.double().view(len(stored), -1)
    found = values * scales[:, groups]
    return found if linear.order is None else found[:, linear.order.argsort()]


def narrow_linear(x: Tensor, linear: Linear) -> Tensor:
    """x W^T + b for a weight of fewer bits, which is widened. x: [num_tokens, inputs]. # [num_tokens, outputs]"""
    found = x.double() @ dequantize(linear).T
    return (found if linear.bias is None else found + linear.bias.double()).to(x.dtype)


def fp8_linear(x: Tensor, linear: Linear) -> Tensor:
    """The same for activations that are rounded to float8_e4m3fn first, as Linear.input_scale says. The units are those
    of float32 arithmetic, and so are the roundings; sums are in float64."""
    own = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 448
    unit = torch.where(linear.input_scale > 0, linear.input_scale, own)
    rounded = (x.float() / unit).clamp(-448, 448).to(torch.float8_e4m3fn)
    found = (rounded.double() * unit.double()) @ dequantize(linear).T
    return (found if linear.bias is None else found + linear.bias.double()).to(x.dtype)


def round_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round K or V as a cache of `dtype` does: each token's vector of one head to the nearest values of int8 (in units
    of its largest magnitude / 127) or float8_e4m3fn (/ 448). # [..., head_dim] float64"""
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    unit = x.double().abs().amax(dim=-1, keepdim=True) / largest
    units = x.double() / unit.clamp(min=torch.finfo(torch.float64).tiny)
    return (units.round() if dtype == torch.int8 else units.to(dtype).double()) * unit


def round_blocks(x: Tensor) -> Tensor:
    """Round activations in blocks of 32 of a row, to multiples of each block's largest magnitude / 127, a float32. A
    block whose magnitudes are all below 1e-30 is zero; one with NaN or infinity is NaN. # [..., inputs] float64"""
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    factor = torch.full_like(largest, 127) / largest  # `127 / largest` would round twice, by way of 1 / largest
    rounded = (blocks.double() * factor.double()).round() * (largest / 127).double()
    rounded = torch.where(largest < 1e-30, 0.0, rounded)
    return torch.where(largest.isfinite(), rounded, torch.nan).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis. x: [..., size], weight: [size]."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """With sum = x + residual, return (rms_norm(sum) in x's type, sum in float32). The residual is float32.

    A bfloat16 residual would be rounded after every layer: the error grows with depth and flips close argmaxes.
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


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up of x = [gate | up], with the tanh approximation of GELU (arXiv 1606.08415)."""
    gate, up = x.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + inner.tanh()) * up).to(x.dtype)


def route(x: Tensor, router: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return (shares in float32, indices of the experts), each [num_tokens, per_token], the largest share first.

    x: [num_tokens, hidden], router: [experts, hidden] float32. Shares are a softmax over all experts (arXiv
    2101.03961), in float32: rounded logits could choose other experts.
    """
    shares, chosen = (x.float() @ router.T).softmax(dim=-1).topk(routing.per_token, dim=-1)
    return (shares / shares.sum(dim=-1, keepdim=True) if routing.renormalize else shares), chosen


def experts(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, routing: Routing) -> Tensor:
    """Run each token's experts one by one, and sum their outputs weighted by their shares. # [num_tokens, hidden]

    gate_up: [experts, 2 * size, hidden], down: [experts, hidden, size]; router: see `route`.
    """
    shares, chosen = route(x, router, routing)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (share, numbers) in enumerate(zip(shares, chosen.tolist(), strict=True)):
        for weight, number in zip(share, numbers, strict=True):
            inner = silu_and_mul((x[token].float() @ gate_up[number].float().T).to(x.dtype).unsqueeze(0))
            out[token] += weight * (inner[0].float() @ down[number].float().T)
    return out.to(x.dtype)


def narrow_experts(x: Tensor, router: Tensor, gate_up: Linear, down: Linear, routing: Routing) -> Tensor:
    """`experts` for weights of fewer bits, which are widened, in float64; what is between the two products is rounded
    to x's type once. # [num_tokens, hidden]"""
    shares, chosen = route(x, router, routing)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (share, numbers) in enumerate(zip(shares, chosen.tolist(), strict=True)):
        for weight, number in zip(share, numbers, strict=True):
            gate, up = (x[token].double() @ dequantize(gate_up.of_expert(number)).T).chunk(2)
            inner = (gate * torch.sigmoid(gate) * up).to(x.dtype).double()
            out[token] += weight * (inner @ dequantize(down.of_expert(number)).T)
    return out.to(x.dtype)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store token t's K and V in slot slots[t].

    k, v: [num_tokens, kv_heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim]; slots: [num_tokens].
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[token]
        v_cache[slot // block_size, slot % block_size] = v[token]


def prepare_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> PagedRows:
    """Return what `attention` needs besides tensors. The reference precomputes nothing."""
    return rows


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: PagedRows, scale: float, *, window: int | None = None
) -> Tensor:
    """softmax(q k^T * scale) v over each row's cached tokens, causal. # [num_tokens, heads, head_dim]

    q: [num_tokens, heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim], which already hold this
    step's K and V. Query head h reads KV head h // (heads / kv_heads). window: how many tokens a query sees, its own
    included; None: all.
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
        keys = torch.arange(context + count, device=q.device)
        queries = keys[context:].unsqueeze(1)
        unseen = keys > queries  # [count, context + count]
        if window is not None:
            unseen |= keys <= queries - window
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        first += count
    return out


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows) -> Tensor:
    """silu(sum over j of weight[:, j] * the input kernel - 1 - j tokens ago). # [num_tokens, channels]

    x: [num_tokens, channels], weight: [channels, kernel]; state: [slots, kernel - 1, channels], each request's last
    inputs, oldest first, updated in place.
    """
    out, first, past = torch.empty_like(x), 0, weight.shape[1] - 1
    for context, count, slot in zip(rows.contexts, rows.counts, rows.slots, strict=True):
        before = state[slot] if context else torch.zeros_like(state[slot])
        inputs = torch.cat((before, x[first : first + count]))  # [past + count, channels]
        for token in range(count):
            total = (inputs[token : token + past + 1].float() * weight.T.float()).sum(dim=0)
            out[first + token] = (total * torch.sigmoid(total)).to(x.dtype)
        state[slot] = inputs[count:]
        first += count
    return out


def log_decay(step: Tensor, rates: tuple[Tensor, Tensor]) -> Tensor:
    """The log of a state's decay factor at each token: rate * softplus(step + bias) < 0. # [num_tokens, value heads]

    rates: (-exp(A), the bias of the steps), each [value heads] float32.
    """
    return rates[0] * torch.nn.functional.softplus(step.float() + rates[1])


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x²) + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.pow(2).sum(dim=-1, keepdim=True) + 1e-6)


def delta_inputs(qkv: Tensor, heads: LinearHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [num_tokens, channels] into float32 (q, k, v) for each value head. q and k are L2-normalised; q is then
    multiplied by key_dim^-1/2. # [num_tokens, value heads, key_dim] twice, [num_tokens, value heads, value_dim]
    """
    wide = qkv.float()
    q_and_k = wide[:, : 2 * heads.key_size].reshape(len(qkv), 2, heads.num_key_heads, heads.key_dim)
    group = heads.num_value_heads // heads.num_key_heads
    q, k = l2_norm(q_and_k).repeat_interleave(group, dim=2).unbind(1)
    v = wide[:, 2 * heads.key_size :].reshape(len(qkv), heads.num_value_heads, heads.value_dim)
    return q * heads.key_dim**-0.5, k, v


def recur(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process one request's tokens one by one; return (what is read after each, the final state).

        S <- exp(log_decay) S;    S <- S + k (strength (v - S^T k))^T;    read S^T q        (arXiv 2412.06464)

    q, k: [count, heads, key_dim], v: [count, heads, value_dim], log_decay and strength: [count, heads],
    state: [heads, key_dim, value_dim].
    """
    read = torch.empty_like(v)
    for token in range(len(q)):
        state = state * log_decay[token].exp()[:, None, None]
        error = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
        state = state + torch.einsum("hk,hv->hkv", k[token], strength[token][:, None] * error)
        read[token] = torch.einsum("hkv,hk->hv", state, q[token])
    return read, state


def delta_rule(
    qkv: Tensor,
    strength: Tensor,
    step: Tensor,
    rates: tuple[Tensor, Tensor],
    heads: LinearHeads,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """Apply the gated delta rule to each row's tokens; see `recur`. # [num_tokens, value_size]

    qkv: [num_tokens, channels]; strength and step, before sigmoid and softplus: [num_tokens, value heads];
    state: [slots, value heads, key_dim, value_dim] float32, updated in place.
    """
    q, k, v = delta_inputs(qkv, heads)
    decay, strength = log_decay(step, rates), strength.float().sigmoid()
    out, first = torch.empty_like(v), 0
    for context, count, slot in zip(rows.contexts, rows.counts, rows.slots, strict=True):
        tokens = slice(first, first + count)
        before = state[slot] if context else torch.zeros_like(state[slot])
        out[tokens], state[slot] = recur(q[tokens], k[tokens], v[tokens], decay[tokens], strength[tokens], before)
        first += count
    return out.flatten(1).to(qkv.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), the norm over each head. x, gate: [num_tokens, heads * size], weight: [size]."""
    normed = rms_norm(x.float().reshape(len(x), -1, len(weight)), weight, eps).flatten(1)
    return (normed * gate.float() * gate.float().sigmoid()).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor, other: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate), plus `other`. x, other: [num_tokens, size], gate: as x, or [num_tokens, 1]."""
    gated = x.float() * gate.float().sigmoid()
    return (gated if other is None else gated + other.float()).to(x.dtype)


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
    """Apply a request's controls to one row of logits [vocab_size], float32, before a token is chosen from it.

    Repetition: Keskar et al., 2019 (CTRL), section 4.1, with the logit's sign taken into account. Frequency and
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
    """Limit one row of logits [vocab_size], controlled and with banned tokens at -inf, to what a grammar allows.

    The grammar has the last word: if no allowed token is left, all of them get the model's `own` logits back.
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
    """Sample a token from one row of logits [vocab_size]: ban, temperature, top-k, top-p, min-p, then inverse CDF.

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


def add_low_rank(y: Tensor, x: Tensor, stack: LowRankStack, slots: Sequence[int]) -> Tensor:
    """y + (x A^T) B^T, computed in float64, with the A and B of each token's slot; -1: the token has no adapter, and
    keeps its y. # as y

    y: [num_tokens, outputs]; x: [num_tokens, inputs]; slots: one for each token.
    """
    out = y.clone()
    bounds = (*stack.firsts, y.shape[1])
    for token, slot in enumerate(slots):
        for part in range(len(stack.firsts) if slot >= 0 else 0):
            of_part = slice(bounds[part], bounds[part + 1])
            added = stack.b[slot, of_part].double() @ (stack.a[slot, part].double() @ x[token].double())
            out[token, of_part] = (y[token, of_part].double() + added).to(y.dtype)
    return out
