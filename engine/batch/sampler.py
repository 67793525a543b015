"""Owns the choice of tokens from logits: controls, temperature, top-k, top-p, min-p, one draw per row.
Never keeps a random state: a row's number is a function of (seed, position), so neighbours cannot change it.

`sample` is for logits on the host, and waits for each result. On a GPU, `engine.execution.gpu.sampler` uses the same
`draw_tokens`, which then reads nothing back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch.logit_controls import Within, apply_controls
from engine.step import RowSampling

# Below this, logits / temperature would overflow float32; the result is greedy long before.
SMALLEST_TEMPERATURE = 1e-5
# top-p sorts this many of the most likely tokens, then NUCLEUS_GROWTH times as many for rows in which these do not
# reach top_p: sorting 16 rows of 49,152 takes 30 ms, their 256 largest 1 ms. If results cannot be read back, all are
# sorted.
NUCLEUS_GUESS = 256
NUCLEUS_GROWTH = 16

_MASK32 = 0xFFFFFFFF

Upload = Callable[[Tensor], Tensor]
"""Copies a tensor from the host to the logits' device, without waiting."""
Draw = Callable[[Tensor, Sequence[int], Sequence[RowSampling], Sequence[int]], Sequence[int]]
"""(logits [rows, vocab] float32, contiguous; the rows to draw from, each with a finite largest logit and no NaN; each
drawn row's sampling parameters; each drawn token's position) -> the drawn rows' tokens."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four 32-bit words from a counter and a key, by Philox4x32-10 (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c2 * 0xCD9E8D57, c0 * 0xD2511F53
        c0, c1, c2, c3 = (low >> 32) ^ c1 ^ k0, low & _MASK32, (high >> 32) ^ c3 ^ k1, high & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) for the token at `position`: the top 53 of Philox's first 64 bits.

    Key: the seed's low and high 32 bits (two's complement). Counter: the position's low and high 32 bits, 0, 0.
    Tests compare recorded values: a change here would change every seeded answer, and break streams that migrate.
    """
    counter = (position & _MASK32, (position >> 32) & _MASK32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample(
    logits: Tensor,
    rows: Sequence[RowSampling],
    positions: Sequence[int],
    answers: Sequence[Sequence[int]],
    within: Within | None = None,
    most_likely: tuple[Tensor, Tensor] | None = None,
    draw: Draw | None = None,
) -> list[int | None]:
    """Choose one token per row: the token at positions[row] of its request.

    logits: [rows, vocab], left unchanged; answers: each row's answer tokens so far, for controls that look back;
    within: the tokens that grammars allow; most_likely: each row's most likely token and its logit, if known; draw: the
    model's own way to draw, used instead of torch.

    None for a row without a finite largest logit (NaN, or every token banned): that row fails, its neighbours do not.

    The order of filters is temperature, top-k, top-p, min-p, each applied to what the one before left; ties go to the
    lower token id. `kernels.reference.sample` defines the result.
    """
    controlled = apply_controls(logits, rows, answers, within)
    if most_likely is None or controlled is not logits:
        best, tokens = controlled.max(dim=-1)  # [rows]
    else:
        tokens, best = most_likely
    # Not by torch, whose operators take 0.1 ms each when the caches are full of weights.
    chosen, sound = tokens.tolist(), [math.isfinite(logit) for logit in best.tolist()]
    drawn = [number for number, row in enumerate(rows) if row.temperature > 0 and sound[number]]
    if drawn:
        wanted, places = [rows[i] for i in drawn], [positions[i] for i in drawn]
        if draw is not None:
            found = draw(controlled.float().contiguous(), drawn, wanted, places)
        else:
            index = torch.tensor(drawn)
            found = draw_tokens(controlled[index] - best[index].unsqueeze(1), wanted, places).tolist()
        for number, token in zip(drawn, found, strict=True):
            chosen[number] = token
    return [token if ok else None for token, ok in zip(chosen, sound, strict=True)]


def draw_tokens(
    scores: Tensor, rows: Sequence[RowSampling], positions: Sequence[int], upload: Upload | None = None
) -> Tensor:
    """Draw one token per row by inverse CDF over the filtered probabilities, in vocabulary order. # [rows] int64

    scores: [rows, vocab] float, logits minus the row's largest; positions: the drawn tokens' positions; upload: needed
    if the scores are on a device that must not be waited for. A row whose scores are NaN gets a meaningless token.
    """
    numbers = [
        [max(row.temperature, SMALLEST_TEMPERATURE) for row in rows],
        [row.top_p for row in rows],
        [row.min_p for row in rows],
        [uniform(row.seed, position) for row, position in zip(rows, positions, strict=True)],
    ]
    temperature, top_p, min_p, number = _put(torch.tensor(numbers, dtype=torch.float64), upload).unsqueeze(2)
    scores = scores / temperature.float()
    _keep_top_k(scores, rows, upload)
    _keep_top_p(scores, rows, top_p, upload)
    mass = scores.double().exp_()  # [rows, vocab], 1 at the most likely
    cumulative = mass.masked_fill_(mass < min_p, 0.0).cumsum_(dim=-1)
    total = cumulative[:, -1:].clone()
    # Rounding must not make the target equal to the total: no token's cumulative mass exceeds the total.
    target = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _put(host: Tensor, upload: Upload | None) -> Tensor:
    return host if upload is None else upload(host)


def _keep_top_k(scores: Tensor, rows: Sequence[RowSampling], upload: Upload | None) -> None:
    """Set all but each row's `top_k` largest scores to -inf, in place."""
    vocab = scores.shape[1]
    limited = [number for number, row in enumerate(rows) if 0 < row.top_k < vocab]
    if not limited:
        return
    limits = [rows[number].top_k for number in limited]
    index, counts = _put(torch.tensor([limited, limits]), upload)
    subset = scores[index]
    scores[index] = _keep_largest(subset, _largest(subset, max(limits)), counts.unsqueeze(1))


def _keep_top_p(scores: Tensor, rows: Sequence[RowSampling], top_p: Tensor, upload: Upload | None) -> None:
    """Set all but the smallest set of tokens whose probability reaches `top_p` to -inf, in place. top_p: [rows, 1]"""
    vocab = scores.shape[1]
    limited = [number for number, row in enumerate(rows) if row.top_p < 1.0]
    guess = NUCLEUS_GUESS if upload is None else vocab
    while limited:
        guess = min(guess, vocab)
        index = _put(torch.tensor(limited), upload)
        subset = scores[index]
        largest = _largest(subset, guess)
        target = top_p[index] * subset.double().exp_().sum(dim=-1, keepdim=True)
        reached = largest.double().exp_().cumsum_(dim=-1)
        counts = (reached < target).sum(dim=-1, keepdim=True) + 1
        kept = _keep_largest(subset, largest, counts.clamp(max=guess))
        if guess == vocab:
            scores[index] = kept
            return
        done = (counts <= guess).squeeze(1)
        scores[index[done]] = kept[done]
        limited = index[~done].tolist()
        guess *= NUCLEUS_GROWTH


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the `count` largest scores of each row, descending. # [rows, count]"""
    if count == scores.shape[1]:
        return scores.sort(dim=-1, descending=True).values
    return scores.topk(count, dim=-1).values


def _keep_largest(scores: Tensor, largest: Tensor, counts: Tensor) -> Tensor:
    """Keep the `counts` largest scores of each row and set the others to -inf. Ties at the threshold go to the lower
    token id.

    scores: [rows, vocab]; largest: [rows, at least counts], from `_largest`; counts: [rows, 1].
    """
    threshold = largest.gather(1, counts - 1)
    above, equal = scores > threshold, scores == threshold
    spare = counts - above.sum(dim=-1, keepdim=True)
    tied = equal & (equal.cumsum(dim=-1) <= spare)
    return scores.masked_fill(~(above | tied), -torch.inf)
