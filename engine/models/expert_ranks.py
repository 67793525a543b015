"""Owns the count of a pass's exchanges with ranks that have other experts, so that those left of them can be made.
Never moves a row, and never knows what a pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.models.computed import Model
from engine.models.decoder import Decoder
from kernels.collectives.experts import NUM_EXCHANGES, exchange_experts
from kernels.collectives.group import Exchanging, given_up


class DividedModel(Model, Protocol):
    """A model of whose experts this rank has some, and others the rest. Each pass makes the same exchanges on all of
    them, whatever rows this rank has in it and whether they can be computed."""

    def begin_pass(self) -> None:
        """Begin a pass: `forward` may be called once, or not at all."""

    def finish_pass(self) -> None:
        """Make the exchanges of the pass that have not been made, without rows.

        Raises:
            RankLostError: a rank is lost.
        """


class CountedExchanges:
    """The ranks of a model that runs operations one by one, and how many exchanges it has made with them in a pass."""

    def __init__(self, ranks: Exchanging) -> None:
        self._ranks = ranks
        self._num_made = 0

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        return self._ranks.size

    def give_up(self, reason: str) -> None:
        self._ranks.give_up(reason)

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        with given_up(self, "exchange rows"):  # which others may have done, so that it cannot be repeated
            found = self._ranks.exchange(rows, counts)
        self._num_made += 1
        return found

    def begin(self) -> None:
        self._num_made = 0

    def finish(self, decoder: Decoder) -> None:
        """Make the exchanges of the layers that the pass has not come to. No layer is left half way: whoever cannot
        compute rows of others gives up."""
        layers = zip(decoder.config.layers, decoder.weights.layers, strict=True)
        mixtures = [(config.experts, layer) for config, layer in layers if config.experts is not None]
        nothing = torch.empty(0, decoder.config.hidden_size, dtype=decoder.dtype)
        for experts, layer in mixtures[self._num_made // NUM_EXCHANGES :]:
            assert layer.router is not None
            exchange_experts(self, nothing, layer.router, layer.gate_up.weight, layer.down.weight, experts.routing)
