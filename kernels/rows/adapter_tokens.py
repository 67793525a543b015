"""Owns the order in which the tokens of a step that have a LoRA adapter are computed: by the adapter's slot, in tiles.
Never looks at values, and never waits for a device: the host knows each row's slot when it packs the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

TILE = 64
"""Tokens of one slot that a program takes. One size for few tokens and many: the order of a token's sums then does not
depend on its neighbours, and with few tokens the adapter's weights are what takes time."""
NO_SLOT = -1
"""The slot of a row without an adapter, and of a tile that is not used."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """The tokens of a step that have an adapter, as kernels read them. A captured step reads the same tensors in each
    replay, with other tokens in them."""

    order: Tensor
    """[num_tokens] int64: the tokens with an adapter, by slot; then -1."""
    tiles: Tensor
    """[num_tiles, 3] int64: slot, and begin and end in `order` of at most TILE of its tokens. Unused: slot NO_SLOT."""

    @staticmethod
    def of(packed: Tensor, num_tokens: int) -> AdapterTokens:
        """Make views of what `pack_tokens` returned, or of a copy."""
        return AdapterTokens(packed[:num_tokens], packed[num_tokens:].view(-1, 3))


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """Return the most tiles that a step can need: each slot that has tokens leaves at most one tile not full."""
    return (num_tokens + min(num_slots, num_tokens) * (TILE - 1)) // TILE


def count_tiles(slots: Sequence[int], counts: Sequence[int]) -> int:
    """Return the number of tiles of a step. slots, counts: each row's slot or NO_SLOT, and its tokens."""
    return sum(-(-count // TILE) for _, count in _tokens_by_slot(slots, counts))


def pack_tokens(slots: Sequence[int], counts: Sequence[int], num_tokens: int, num_tiles: int) -> Tensor:
    """Pack order and tiles for a step of `num_tokens` with padding, and room for `num_tiles`.
    # [num_tokens + 3 * num_tiles] int64

    slots, counts: each row's slot or NO_SLOT, and its tokens. Nothing loops over tokens.
    """
    begins = accumulate(counts, initial=0)
    rows = sorted((slot, begin, count) for slot, begin, count in zip(slots, begins, counts, strict=False) if slot >= 0)
    order = [torch.arange(begin, begin + count) for _, begin, count in rows]
    left = num_tokens - sum(count for _, _, count in rows)
    tiles, first = [], 0
    for slot, count in _tokens_by_slot(slots, counts):
        end = first + count
        tiles += [(slot, begin, min(begin + TILE, end)) for begin in range(first, end, TILE)]
        first = end
    assert left >= 0, "the step fits its layout"
    assert len(tiles) <= num_tiles, "the step fits its layout"
    tiles += [(NO_SLOT, 0, 0)] * (num_tiles - len(tiles))
    return torch.cat([*order, torch.full((left,), -1), torch.tensor(tiles, dtype=torch.int64).flatten()])


def _tokens_by_slot(slots: Sequence[int], counts: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return (slot, number of its tokens), by slot."""
    found: dict[int, int] = {}
    for slot, count in zip(slots, counts, strict=True):
        if slot != NO_SLOT:
            found[slot] = found.get(slot, 0) + count
    return sorted(found.items())
