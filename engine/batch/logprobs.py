"""Owns log-probabilities of sampled tokens, and of prompt tokens from the hidden states of their chunks.
Never sees bans, temperature or filters, and never holds the logits of more prompt positions than SCORED_POSITIONS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, repeat

import torch
from torch import Tensor

from engine.protocol import TokenLogprobs
from engine.step import RowSampling, ScheduledRequest

# Positions whose log-probabilities are computed at a time. In float32, with ranks and copies, they take at most 32
# bytes per position and vocabulary token: 100 MB at 49,152, however long the prompt. Fewer would read lm_head more
# often.
SCORED_POSITIONS = 64

Wanted = tuple[int, int, int]
"""(row of the logits, token id, how many alternatives to report)"""


def sampled_logprobs(
    logits: Tensor, rows: Sequence[RowSampling], tokens: Sequence[int | None]
) -> dict[int, TokenLogprobs | None]:
    """Return by row the log-probabilities of sampled tokens, for rows that ask for them and have a token. logits:
    [rows, vocab], the model's own."""
    wanted = [
        (number, token, row.num_logprobs)
        for number, (row, token) in enumerate(zip(rows, tokens, strict=True))
        if row.num_logprobs is not None and token is not None
    ]
    return dict(zip((number for number, _, _ in wanted), _in_pieces(wanted, logits.__getitem__), strict=True))


def prompt_logprobs(
    rows: Sequence[ScheduledRequest], logits_at: Callable[[Tensor], Tensor]
) -> dict[int, tuple[TokenLogprobs, ...] | None]:
    """Return by row the log-probabilities of prompt tokens, for rows with `scoring`; None if a position has no
    distribution.

    logits_at: indices of the step's tokens [n] -> their logits [n, vocab].
    """
    scores = wanted_scores(rows)
    wanted = [score for row in scores.values() for score in row]
    return scores_by_row(scores, _in_pieces(wanted, logits_at, ranked=True))


def wanted_scores(rows: Sequence[ScheduledRequest]) -> dict[int, list[Wanted]]:
    """Return by row the scores that rows with `scoring` ask for. A row of the logits is the index of a step's token."""
    scores: dict[int, list[Wanted]] = {}
    begin = 0  # the row's first token within the step
    for number, row in enumerate(rows):
        if (scoring := row.scoring) is not None:
            index = begin + scoring.first - row.start
            scores[number] = [(index + i, token, scoring.num_logprobs) for i, token in enumerate(scoring.token_ids)]
        begin += len(row.token_ids)
    return scores


def scores_by_row(
    wanted: Mapping[int, Sequence[Wanted]], found: Iterable[TokenLogprobs | None]
) -> dict[int, tuple[TokenLogprobs, ...] | None]:
    """Group `found`, which is in the order of `wanted`, by row. None for a row that lacks a score."""
    rest = iter(found)
    return {number: _all(islice(rest, len(row))) for number, row in wanted.items()}


def _all(found: Iterable[TokenLogprobs | None]) -> tuple[TokenLogprobs, ...] | None:
    every = tuple(found)
    good = tuple(logprob for logprob in every if logprob is not None)
    return good if len(good) == len(every) else None


def _in_pieces(
    wanted: Sequence[Wanted], logits_at: Callable[[Tensor], Tensor], *, ranked: bool = False
) -> list[TokenLogprobs | None]:
    """logits_at: row numbers [n] -> logits [n, vocab]."""
    found: list[TokenLogprobs | None] = []
    for first in range(0, len(wanted), SCORED_POSITIONS):
        index, token_ids, counts = zip(*wanted[first : first + SCORED_POSITIONS], strict=True)
        found += token_logprobs(logits_at(torch.tensor(index)), token_ids, counts, ranked=ranked)
    return found


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of token_ids[i] and of the counts[i] most likely tokens under logits[i].

    Ties go to the lower token id.

    None for a row without a distribution: its logits hold a NaN or +inf, or are all -inf. logits: [rows, vocab].
    `ranked`: also report the rank of each of token_ids.
    """
    index = torch.tensor(token_ids)
    ranks = find_ranks(logits, index) if ranked else None
    return read_logprobs(find_logprobs(logits, index, max(counts)), token_ids, counts, ranks)


def find_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprob of token_ids[i], and ids and logprobs of the `most` most likely tokens, for `read_logprobs`.

    The tensors stay on the logits' device. Does not wait for the device. logits: [rows, vocab]; token_ids: [rows].
    # [rows], [rows, most] and [rows, most]"""
    wide = logits.float()
    logprobs = wide.log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    top_ids = _most_likely(wide, min(most, wide.shape[1]))
    return own, top_ids, logprobs.gather(1, top_ids)


def find_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the rank of token_ids[i] among all tokens in the order of `find_logprobs`, from 1. Does not wait for the
    device. logits: [rows, vocab]; token_ids: [rows]. # [rows] int64"""
    own = logits.gather(1, token_ids.unsqueeze(1))
    is_lower = torch.arange(logits.shape[1], device=logits.device) < token_ids.unsqueeze(1)
    return ((logits > own) | ((logits == own) & is_lower)).sum(dim=1) + 1


def read_logprobs(
    found: tuple[Tensor, Tensor, Tensor],
    token_ids: Sequence[int],
    counts: Sequence[int],
    ranks: Tensor | None = None,
) -> list[TokenLogprobs | None]:
    """Turn the tensors of `find_logprobs`, now on the host, into TokenLogprobs. counts[i]: how many alternatives
    token_ids[i] gets. ranks: the result of `find_ranks`."""
    own, top_ids, tops = (tensor.tolist() for tensor in found)
    places = repeat(None, len(own)) if ranks is None else ranks.tolist()
    return [
        TokenLogprobs(token, value, tuple(islice(zip(ids, top, strict=True), count)), rank) if value == value else None
        for token, value, count, ids, top, rank in zip(token_ids, own, counts, top_ids, tops, places, strict=True)
    ]  # NaN does not equal itself


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Return the ids of each row's `count` largest logits, best first. # [rows, count] int64

    torch.topk returns equal values in any order, and in bfloat16 many values are equal. So this ranks distinct
    integers: the float's bits, adjusted to sort as the float does, in the upper half, and the token id, counted
    downwards, in the lower half.
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (
        bits.long().mul_(1 << 32).sub_(torch.arange(logits.shape[1], device=logits.device)).topk(count, dim=-1).indices
    )
