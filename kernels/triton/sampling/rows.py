"""Owns the packing of rows' sampling parameters on the host, with one copy to the device for each type of number.
Never sees a logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows.integers import joined
from kernels.rows.row_tokens import RowTokens
from kernels.rows.sampled_row import SampledRow


class Edits(NamedTuple):
    """Edits of single logits, in the order of the kernel's arguments."""

    biased_begins: Tensor  # [rows + 1] int32: each row's first biased token
    biased: Tensor  # [biased] int32, distinct within a row
    biases: Tensor  # [biased] float32
    banned_begins: Tensor  # [rows + 1] int32: each row's first banned token
    banned: Tensor  # [banned] int32
    afters: Tensor  # [banned] int32: only if this is the row's newest token; -1: always


@dataclass(frozen=True, slots=True)
class Controls:
    """What changes the rows' logits, on the device."""

    tokens: RowTokens
    penalties: tuple[Tensor, Tensor, Tensor]
    """Repetition, frequency and presence, [rows] float64 each. Only read for rows that have counts."""
    edits: Edits | None = None
    allowed: Tensor | None = None
    """[rows, ceil(vocab / 32)] int32: token t is bit t % 32 of word t // 32."""
    within: Tensor | None = None
    """Packed as `allowed`: what grammars allow. They have the last word. All bits set: no grammar."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """All SampledRows as the kernels read them, on the device. Padding has temperature 0; nobody reads its token."""

    temperatures: Tensor  # [rows] float64
    top_ps: Tensor  # [rows] float64
    min_ps: Tensor  # [rows] float64
    top_ks: Tensor  # [rows] int64; 0: no limit
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    controls: Controls | None = None


def pack_rows(
    rows: Sequence[SampledRow],
    vocab: int,
    device: torch.device | str,
    within: Tensor | None = None,
    tokens: RowTokens | None = None,
) -> SampledRows:
    """Pack rows for `device`. Copies to a GPU come from pinned memory, and nothing waits for them. within: as in
    Controls, on any device. tokens: needed if a row has penalties, or bans that depend on its newest token."""

    def moved(host: Tensor) -> Tensor:
        return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host

    numbers = [
        (row.temperature, row.top_p, row.min_p, row.repetition_penalty, row.frequency_penalty, row.presence_penalty)
        for row in rows
    ]
    floats = moved(torch.tensor(numbers, dtype=torch.float64).T.contiguous())
    integers = moved(
        torch.tensor([(row.top_k, row.seed, row.position) for row in rows], dtype=torch.int64).T.contiguous()
    )
    temperatures, top_ps, min_ps, *penalties = floats
    top_ks, seeds, positions = integers
    assert tokens is not None or not any(row.looks_back for row in rows), "penalties without the tokens they count"
    controls = None
    if within is not None or any(row.is_controlled for row in rows):
        limited = any(row.allowed is not None for row in rows)
        controls = Controls(
            tokens or _no_tokens(len(rows), device),
            (penalties[0], penalties[1], penalties[2]),
            edits=_edits(rows, moved),
            allowed=moved(_bits([row.allowed for row in rows], vocab)) if limited else None,
            within=None if within is None else moved(within),
        )
    return SampledRows(temperatures, top_ps, min_ps, top_ks, seeds, positions, controls)


def _no_tokens(num_rows: int, device: torch.device | str) -> RowTokens:
    """Return the tokens of rows without penalties, for kernels that read which rows have some."""
    none = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    return RowTokens(torch.empty(0, dtype=torch.int32, device=device), none, none.unsqueeze(1))


def _edits(rows: Sequence[SampledRow], moved: Callable[[Tensor], Tensor]) -> Edits | None:
    """Return the rows' edits, in one copy to the device, or None if they have none."""
    biased = [[token for token, _ in row.bias] for row in rows]
    banned = [[*row.banned, *(token for _, token in row.banned_after)] for row in rows]
    if not any(biased) and not any(banned):
        return None
    parts: list[Sequence[int]] = [list(accumulate(map(len, biased), initial=0)), *biased]
    parts += [list(accumulate(map(len, banned), initial=0)), *banned]
    parts += [[*(-1 for _ in row.banned), *(newest for newest, _ in row.banned_after)] for row in rows]
    integers = torch.frombuffer(joined(parts), dtype=torch.int64).to(torch.int32)
    biases = torch.tensor([amount for row in rows for _, amount in row.bias], dtype=torch.float32)
    num_biased, num_banned = len(biases), sum(map(len, banned))
    there = moved(torch.cat([integers, biases.view(torch.int32)]))
    sizes = [len(rows) + 1, num_biased, len(rows) + 1, num_banned, num_banned, num_biased]
    begins, tokens, bans, banned_tokens, afters, amounts = there.split(sizes)
    return Edits(begins, tokens, amounts.view(torch.float32), bans, banned_tokens, afters)


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
