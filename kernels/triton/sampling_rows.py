"""Owns how rows say what is to be sampled: packed on the host, one copy a kind to the device.
Never sees a logit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from kernels.sampled_row import SampledRow


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of single logits: plus bias, over the repetition penalty (times it, if negative), minus penalty."""

    begins: Tensor  # [rows + 1] int32: each row's first edit
    tokens: Tensor  # [edits] int32, no two of a row equal
    biases: Tensor  # [edits] float32
    repetitions: Tensor  # [edits] float32
    penalties: Tensor  # [edits] float32; infinite: the token is banned


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the kernels read, all on the device. A row of padding has temperature 0, whose token nobody reads."""

    temperatures: Tensor  # [rows] float64
    top_ps: Tensor  # [rows] float64
    min_ps: Tensor  # [rows] float64
    top_ks: Tensor  # [rows] int64; 0: no limit
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    edits: Edits | None = None
    allowed: Tensor | None = None
    """[rows, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is token t's."""
    within: Tensor | None = None
    """As `allowed`: what grammars leave, which has the last word. All bits set: no grammar."""


def pack_rows(
    rows: Sequence[SampledRow], vocab: int, device: torch.device | str, within: Tensor | None = None
) -> SamplingRows:
    """Copies from pinned memory where there is a GPU, which nothing waits for. within: as in SamplingRows, anywhere."""

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
    return SamplingRows(
        temperatures,
        top_ps,
        min_ps,
        top_ks,
        seeds,
        positions,
        edits=None if edits is None else Edits(*map(moved, edits)),
        allowed=moved(_bits([row.allowed for row in rows], vocab)) if limited else None,
        within=None if within is None else moved(within),
    )


def _edits(rows: Sequence[SampledRow]) -> tuple[Tensor, ...] | None:
    """Of all rows, one after another; None: there are none."""
    each = [_row_edits(row) for row in rows]
    if not any(each):
        return None
    begins = torch.tensor(list(accumulate(map(len, each), initial=0)), dtype=torch.int32)
    flat = [(token, *edit) for row in each for token, edit in row.items()]
    numbers = torch.tensor([numbers for _, *numbers in flat], dtype=torch.float32).T.contiguous()
    return begins, torch.tensor([token for token, *_ in flat], dtype=torch.int32), *numbers


def _row_edits(row: SampledRow) -> dict[int, list[float]]:
    """By token: [bias, repetition penalty, penalty]."""
    edits: dict[int, list[float]] = {}

    def edit(token: int) -> list[float]:
        return edits.setdefault(token, [0.0, 1.0, 0.0])

    for token, amount in row.bias:
        edit(token)[0] += amount
    if row.repetition_penalty != 1.0:
        for token in (*row.prompt, *row.answer):
            edit(token)[1] = row.repetition_penalty
    if row.frequency_penalty or row.presence_penalty:
        for token, times in Counter(row.answer).items():
            edit(token)[2] = times * row.frequency_penalty + row.presence_penalty
    for token in (*row.banned, *(word[-1] for word in row.bad_words if _ends_with(row.answer, word[:-1]))):
        edit(token)[2] = inf
    return edits


def _ends_with(answer: Sequence[int], tokens: Sequence[int]) -> bool:
    return list(answer[max(len(answer) - len(tokens), 0) :]) == list(tokens)


def _bits(sets: Sequence[Sequence[int] | None], vocab: int) -> Tensor:
    """None: every token. # [len(sets), ceil(vocab / 32)] int32"""
    words = torch.full((len(sets), -(-vocab // 32)), -1, dtype=torch.int32)
    for number, tokens in enumerate(sets):
        if tokens is not None:
            bits = torch.zeros(words.shape[1] * 32, dtype=torch.int64)
            bits[list(tokens)] = 1
            packed = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
            words[number] = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return words
