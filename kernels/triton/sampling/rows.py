"""Owns the packing of rows' sampling parameters on the host, with one copy to the device for each type of number.
Never sees a logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from kernels.rows.integers import joined
from kernels.rows.sampled_row import SampledRow


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of single logits: add the bias, divide by the repetition penalty (multiply if negative), subtract the
    penalty."""

    begins: Tensor  # [rows + 1] int32: each row's first edit
    tokens: Tensor  # [edits] int32, distinct within a row
    biases: Tensor  # [edits] float32
    repetitions: Tensor  # [edits] float32
    penalties: Tensor  # [edits] float32; infinite: the token is banned


@dataclass(frozen=True, slots=True)
class SampledRows:
    """All SampledRows as the kernels read them, on the device. Padding has temperature 0; nobody reads its token."""

    temperatures: Tensor  # [rows] float64
    top_ps: Tensor  # [rows] float64
    min_ps: Tensor  # [rows] float64
    top_ks: Tensor  # [rows] int64; 0: no limit
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    edits: Edits | None = None
    allowed: Tensor | None = None
    """[rows, ceil(vocab / 32)] int32: token t is bit t % 32 of word t // 32."""
    within: Tensor | None = None
    """Packed as `allowed`: what grammars allow. They have the last word. All bits set: no grammar."""


def pack_rows(
    rows: Sequence[SampledRow], vocab: int, device: torch.device | str, within: Tensor | None = None
) -> SampledRows:
    """Pack rows for `device`. Copies to a GPU come from pinned memory, and nothing waits for them. within: as in
    SampledRows, on any device."""

    def moved(host: Tensor) -> Tensor:
        return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host

    floats = moved(
        torch.tensor([(row.temperature, row.top_p, row.min_p) for row in rows], dtype=torch.float64).T.contiguous()
    )
    integers = moved(
        torch.tensor([(row.top_k, row.seed, row.position) for row in rows], dtype=torch.int64).T.contiguous()
    )
    edits = _edits(rows)
    limited = any(row.allowed is not None for row in rows)
    temperatures, top_ps, min_ps = floats
    top_ks, seeds, positions = integers
    return SampledRows(
        temperatures,
        top_ps,
        min_ps,
        top_ks,
        seeds,
        positions,
        edits=None if edits is None else _edits_of(moved(edits[0]), moved(edits[1]), len(rows)),
        allowed=moved(_bits([row.allowed for row in rows], vocab)) if limited else None,
        within=None if within is None else moved(within),
    )


def _edits_of(integers: Tensor, floats: Tensor, num_rows: int) -> Edits:
    biases, repetitions, penalties = floats
    return Edits(integers[: num_rows + 1], integers[num_rows + 1 :], biases, repetitions, penalties)


def _edits(rows: Sequence[SampledRow]) -> tuple[Tensor, Tensor] | None:
    """Return the (begins and tokens [rows + 1 + edits] int32, the three numbers [3, edits] float32) of `Edits`, or None
    without edits.

    Nothing loops over tokens in Python: with a repetition penalty, each step counts a whole prompt, perhaps 100,000.
    """
    kinds: tuple[list[Sequence[int]], ...] = (
        [[token for token, _ in row.bias] for row in rows],
        [_seen(row) if row.repetition_penalty != 1.0 else () for row in rows],
        [row.answer if row.frequency_penalty or row.presence_penalty else () for row in rows],
        [_banned(row) for row in rows],
    )
    if not any(tokens for kind in kinds for tokens in kind):
        return None
    found = [_places(kind) for kind in kinds]
    places, edit_of = torch.cat(found).unique(return_inverse=True)  # sorted: row by row
    biased, seen, answered, banned = edit_of.split([len(kind) for kind in found])
    row_of = places >> 32
    repetition, frequency, presence = torch.tensor(
        [(row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for row in rows], dtype=torch.float64
    ).T
    numbers = torch.zeros(3, len(places), dtype=torch.float64)
    amounts = [amount for row in rows for _, amount in row.bias]
    numbers[0].index_add_(0, biased, torch.tensor(amounts, dtype=torch.float64))
    numbers[1] = 1.0
    numbers[1, seen] = repetition[row_of[seen]]
    times = answered.bincount(minlength=len(places))
    numbers[2] = torch.where(times > 0, times * frequency[row_of] + presence[row_of], 0.0)
    numbers[2, banned] = inf
    begins = torch.searchsorted(places, torch.arange(len(rows) + 1) << 32)
    return torch.cat([begins, places & 0xFFFFFFFF]).to(torch.int32), numbers.to(torch.float32)


def _places(tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return row << 32 | token for every token of every row. # [tokens of all rows] int64"""
    flat = joined(tokens)
    if not flat:
        return torch.empty(0, dtype=torch.int64)
    row_of = torch.arange(len(tokens)).repeat_interleave(torch.tensor([len(row_tokens) for row_tokens in tokens]))
    return (row_of << 32) + torch.frombuffer(flat, dtype=torch.int64)


def _seen(row: SampledRow) -> list[int]:
    return list(dict.fromkeys((*row.prompt, *row.answer)))


def _banned(row: SampledRow) -> list[int]:
    return [*row.banned, *(word[-1] for word in row.bad_words if _ends_with(row.answer, word[:-1]))]


def _ends_with(answer: Sequence[int], tokens: Sequence[int]) -> bool:
    return list(answer[max(len(answer) - len(tokens), 0) :]) == list(tokens)


def _bits(sets: Sequence[Sequence[int] | None], vocab: int) -> Tensor:
    """Pack sets of tokens into bits. None: every token. # [len(sets), ceil(vocab / 32)] int32"""
    words = torch.full((len(sets), -(-vocab // 32)), -1, dtype=torch.int32)
    for number, tokens in enumerate(sets):
        if tokens is not None:
            bits = torch.zeros(words.shape[1] * 32, dtype=torch.int64)
            bits[list(tokens)] = 1
            packed = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
            words[number] = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return words
