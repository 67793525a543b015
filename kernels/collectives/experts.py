"""Owns mixtures whose experts are divided over ranks with tokens of their own: rows go to where their experts are.
Never needs ranks to have equally many tokens, and never lets a token's sum depend on those of others."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.collectives.group import Exchanging, given_up
from kernels.cpu.experts import expert_products
from kernels.forward import Routing, held_experts
from kernels.reference import route

NUM_EXCHANGES = 2
"""Exchanges of rows in one layer: to the experts, and back."""

_NUMBER = torch.int64
"""The type of the expert's number that follows each row."""


def exchange_experts(
    ranks: Exchanging, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, routing: Routing
) -> Tensor:
    """Compute `kernels.reference.experts` of this rank's tokens. All ranks must call it at the same time, also those
    without tokens.

    x: [num_tokens, hidden]; router: [experts, hidden] float32; gate_up: [held, 2 * size, hidden], down: [held, hidden,
    size], of the experts that this rank holds.

    A row goes to the rank of each of its experts, and what that expert makes of it comes back. It is weighted and
    summed here, the largest share first.

    Raises:
        RankLostError: a rank is lost, or this one could not compute rows of others: it has given up.
    """
    shares, chosen = route(x, router, routing)  # [num_tokens, per_token]
    numbers, order = chosen.flatten().sort(stable=True)  # of (token, place of the expert), by expert
    ends = torch.tensor([held_experts(len(router), rank, ranks.size).stop for rank in range(ranks.size)])
    counts = torch.searchsorted(numbers, ends).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    arrived, received = ranks.exchange(_numbered(x[order // routing.per_token], numbers), counts)
    with given_up(ranks, "compute rows of others"):
        rows, wanted = _unnumbered(arrived, x.dtype)
        first = held_experts(len(router), ranks.rank, ranks.size).start
        found = expert_products(rows, wanted - first, gate_up, down)
    back, _ = ranks.exchange(found, received)
    by_token = torch.empty_like(back)
    by_token[order] = back
    weighted = by_token.view(len(x), routing.per_token, x.shape[1]).float() * shares.unsqueeze(-1)
    return weighted.sum(dim=1).to(x.dtype)


def _numbered(rows: Tensor, numbers: Tensor) -> Tensor:
    """Lay each row's number behind it. # [rows, bytes] uint8"""
    return torch.cat((_bytes_of(rows), _bytes_of(numbers.to(_NUMBER).unsqueeze(1))), dim=1)


def _unnumbered(found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows, and their numbers, of _numbered."""
    size = _NUMBER.itemsize
    return found[:, :-size].contiguous().view(dtype), found[:, -size:].contiguous().view(_NUMBER).flatten()


def _bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
