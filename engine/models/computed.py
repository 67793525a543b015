"""Owns what a forward pass leaves behind for the choice of tokens.
Never outlives the step: the next pass may use the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.batch.sampler import Draw
from engine.models.recurrent_state import RecurrentState
from engine.step import StepPlan
from kernels.eager.rewind import Rewind


@dataclass(frozen=True, slots=True)
class Computed:
    """What one step computed. A place is a token after which one is sampled; see engine.batch.row_order."""

    hidden: Tensor
    """[num_tokens, hidden], the final state of each token"""
    logits: Tensor
    """[places, vocab]"""
    logits_at: Callable[[Tensor], Tensor]
    """Numbers of tokens [n] -> their logits [n, vocab]."""
    best: tuple[Tensor, Tensor] | None = None
    """(each place's most likely token, its logit), if the pass has found them: the lowest of equal tokens; a logit that
    is not finite where the place's logits are no distribution."""
    draw: Draw | None = None
    """Draws tokens in torch's stead; see engine.batch.sampler."""
    rewind: Rewind | None = None
    """Of a model with recurrent state, where rows have drafts: to be told how many of each row's tokens count."""

    @classmethod
    def by_torch(cls, hidden: Tensor, sampled: Tensor, lm_head: Tensor, rewind: Rewind | None = None) -> Computed:
        """With the LM head as torch's operators multiply it, wherever the tensors are. hidden: [num_tokens, hidden];
        sampled: the places' tokens, [places] int64; lm_head: [vocab, hidden]."""

        def logits_at(index: Tensor) -> Tensor:
            return F.linear(hidden[index], lm_head)

        return cls(hidden, logits_at(sampled), logits_at, rewind=rewind)


class Model(Protocol):
    """A model that runs steps, with the KV cache and the recurrent states that it reads and writes."""

    @property
    def state(self) -> RecurrentState | None:
        """None: the model has none."""

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        """Run a plan in kernel order (see engine.batch.row_order). `newest`: what a request's PENDING_TOKEN stands for.

        Raises:
            ValueError: a row breaks the seam's contract.
        """
