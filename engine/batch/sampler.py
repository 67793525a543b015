"""Owns the choice of tokens from logits: controls, temperature, top-k, top-p, min-p, one draw per row.
Never keeps a random state: the number a row uses is a function of (seed, position), so neighbours cannot change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch.logit_controls import Within, control_logits
from engine.step import RowSampling

# Below this, logits / temperature would overflow float32; the result is greedy long before.
SMALLEST_TEMPERATURE = 1e-5
# top-p sorts this many of the most likely tokens, and NUCLEUS_GROWTH times as many for rows whose mass is not in them:
# sorting 16 rows of 49,152 takes 30 ms, their 256 largest 1 ms.
NUCLEUS_GUESS = 256
NUCLEUS_GROWTH = 16

_MASK32 = 0xFFFFFFFF

Draw = Callable[[Tensor, Sequence[int], Sequence[RowSampling], Sequence[int]], Sequence[int]]
"""(logits [rows, vocab] float32, contiguous; which rows to draw from, each with a finite largest logit and no NaN; how,
by drawn row; the token's position, by drawn row) -> the drawn rows' tokens."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c2 * 0xCD9E8D57, c0 * 0xD2511F53
        c0, c1, c2, c3 = (low >> 32) ^ c1 ^ k0, low & _MASK32, (high >> 32) ^ c3 ^ k1, high & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`: the top 53 of Philox's first 64 bits.

    Key: the seed's low and high 32 bits (two's complement). Counter: the position's low and high 32 bits, 0, 0.
    Recorded values are tested: a change here would change every seeded answer, and streams in migration.
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
    """One token per row, the one at positions[row] of its request. logits: [rows, vocab], which are not changed;
    answers: of each row, the answer's tokens so far, read where its controls look back; within: what grammars allow;
    most_likely: each row's most likely token and its logit, if that is known; draw: what the model draws with, if torch
    is not to.

    None for a row without a finite largest logit (NaN, or every token banned): it has no answer, and its neighbours
    are not to blame.

    The order of filters is temperature, top-k, top-p, min-p, each on what the one before left; ties go to the lower
    token id. `kernels.reference.sample` defines the result.
    """
    controlled = control_logits(logits, rows, answers, within)
    if most_likely is None or controlled is not logits:
        best, tokens = controlled.max(dim=-1)  # [rows]
    else:
        tokens, best = most_likely[0].clone(), most_likely[1]
    sound = best.isfinite().tolist()
    drawn = [number for number, row in enumerate(rows) if row.temperature > 0 and sound[number]]
    if drawn:
        index, wanted, places = torch.tensor(drawn), [rows[i] for i in drawn], [positions[i] for i in drawn]
        if draw is not None:
            tokens[index] = torch.tensor(draw(controlled.float().contiguous(), drawn, wanted, places))
        else:
            scores = controlled[index] - best[index].unsqueeze(1)  # [drawn, vocab], 0 at the most likely
            tokens[index] = _draw(scores, wanted, list(map(uniform, (row.seed for row in wanted), places)))
    return [int(token) if ok else None for token, ok in zip(tokens.tolist(), sound, strict=True)]


def _draw(scores: Tensor, rows: list[RowSampling], draws: list[float]) -> Tensor:
    """Inverse CDF over the filtered probabilities, in vocabulary order. # [rows] int64"""
    temperature = torch.tensor([max(row.temperature, SMALLEST_TEMPERATURE) for row in rows])
    scores = scores / temperature.unsqueeze(1)
    _keep_top_k(scores, rows)
    _keep_top_p(scores, rows)
    mass = scores.double().exp_()  # [rows, vocab], 1 at the most likely
    mass.masked_fill_(mass < torch.tensor([row.min_p for row in rows], dtype=torch.float64).unsqueeze(1), 0.0)
    cumulative = mass.cumsum_(dim=-1)
    total = cumulative[:, -1:].clone()
    # Rounding must not reach the total itself: no token's cumulative mass exceeds that.
    target = torch.tensor(draws, dtype=torch.float64).unsqueeze(1) * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _keep_top_k(scores: Tensor, rows: list[RowSampling]) -> None:
    """Set all but each row's `top_k` largest to -inf, in place."""
    vocab = scores.shape[1]
    limited = [number for number, row in enumerate(rows) if 0 < row.top_k < vocab]
    if not limited:
        return
    index = torch.tensor(limited)
    counts = torch.tensor([rows[number].top_k for number in limited]).unsqueeze(1)
    largest = scores[index].topk(int(counts.max()), dim=-1).values
    scores[index] = keep_largest(scores[index], largest.gather(1, counts - 1), counts)


def _keep_top_p(scores: Tensor, rows: list[RowSampling]) -> None:
    """Set all but the smallest set of tokens whose probability reaches `top_p` to -inf, in place."""
    limited = [number for number, row in enumerate(rows) if row.top_p < 1.0]
    guess = NUCLEUS_GUESS
    while limited:
        guess = min(guess, scores.shape[1])
        index = torch.tensor(limited)
        top_p = torch.tensor([rows[number].top_p for number in limited], dtype=torch.float64).unsqueeze(1)
        subset = scores[index]
        largest = subset.topk(guess, dim=-1).values  # [limited, guess], descending
        target = top_p * subset.double().exp_().sum(dim=-1, keepdim=True)
        reached = largest.double().exp_().cumsum_(dim=-1)
        counts = (reached < target).sum(dim=-1, keepdim=True) + 1
        done = (counts <= guess).squeeze(1) if guess < scores.shape[1] else torch.ones(len(limited), dtype=torch.bool)
        counts = counts.clamp_(max=guess)
        scores[index[done]] = keep_largest(subset, largest.gather(1, counts - 1), counts)[done]
        limited = index[~done].tolist()
        guess *= NUCLEUS_GROWTH


def keep_largest(scores: Tensor, threshold: Tensor, counts: Tensor) -> Tensor:
    """The `counts` largest of each row, -inf elsewhere; of those equal to the threshold, the lowest token ids.

    scores: [rows, vocab]; threshold: [rows, 1], the counts-th largest score; counts: [rows, 1].
    """
    above, equal = scores > threshold, scores == threshold
    spare = counts - above.sum(dim=-1, keepdim=True)
    tied = equal & (equal.cumsum(dim=-1) <= spare)
    return scores.masked_fill(~(above | tied), -torch.inf)
