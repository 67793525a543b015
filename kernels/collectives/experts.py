"""Owns mixtures whose experts are spread over ranks with tokens of their own: a token goes to where its experts are.
Never needs ranks to have equally many tokens: all take part with room for the most that any has."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.elementwise import silu_and_mul
from kernels.forward import Routing
from kernels.reference import route


class Sums(Protocol):
    """What an exchange needs of kernels.collectives.group.Group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...


NUM_SUMS = 2
"""Sums over the ranks in one exchange."""


def held_experts(count: int, rank: int, size: int) -> range:
    """Return which of `count` experts a rank holds; sizes differ by one at most."""
    return range(count * rank // size, count * (rank + 1) // size)


def exchange_experts(
    ranks: Sums, x: Tensor, most: int, router: Tensor, gate_up: Tensor, down: Tensor, routing: Routing
) -> Tensor:
    """Compute `kernels.reference.experts` of this rank's tokens. All ranks must call it at the same time, also those
    without tokens.

    x: [num_tokens, hidden]; most: the same on all ranks, num_tokens or more; router: [experts, hidden] float32;
    gate_up: [held, 2 * size, hidden], down: [held, hidden, size], of the experts that this rank holds.

    Every sum over the ranks has one number that is not 0 in each place, so it is that number. The first gives all
    tokens to all ranks, and the second all results, of which a rank needs its own: `size` times what an exchange of
    what was chosen would move. It is the definition of such an exchange, not a fast one.
    """
    num_tokens, hidden, per_token = len(x), x.shape[1], routing.per_token
    shares, chosen = route(x, router, routing)  # [num_tokens, per_token]
    sent = torch.zeros(ranks.size, most, hidden + per_token)  # float32
    sent[ranks.rank, :num_tokens, :hidden] = x
    sent[ranks.rank, :num_tokens, hidden:] = chosen + 1  # 0: there is no token
    ranks.all_reduce(sent)
    tokens = sent[..., :hidden].reshape(-1, hidden).to(x.dtype)
    wanted = sent[..., hidden:].reshape(-1).long() - 1  # [ranks * most * per_token]
    found = torch.zeros(len(wanted), hidden)
    for place, number in enumerate(held_experts(len(router), ranks.rank, ranks.size)):
        rows = (wanted == number).nonzero().flatten()
        if len(rows):
            inner = silu_and_mul(F.linear(tokens[rows // per_token], gate_up[place]))
            found[rows] = F.linear(inner, down[place]).float()
    ranks.all_reduce(found)
    by_token = found.view(ranks.size, most, per_token, hidden)[ranks.rank, :num_tokens]
    return (by_token * shares.unsqueeze(-1)).sum(dim=1).to(x.dtype)
