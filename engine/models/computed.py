"""Owns the results of a forward pass from which tokens are chosen.
Never outlives the step: the next pass may reuse the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch.sampler import Draw
from engine.models.kv_cache import KVCache
from engine.models.recurrent_state import RecurrentState
from engine.step import AdapterHost, StepPlan


class Rewind(Protocol):
    """The way back past the rejected drafts of one step."""

    def to(self, counts: Sequence[int]) -> None:
        """Set recurrent states to those after each row's first counts[row] tokens. 0: nobody reads the row's state
        again."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of one step. A place is a token after which a token is sampled; see engine.batch.row_order."""

    hidden: Tensor
    """[num_tokens, hidden], the final state of each token"""
    logits: Tensor
    """[places, vocab]"""
    logits_at: Callable[[Tensor], Tensor]
    """Indices of tokens [n] -> their logits [n, vocab]."""
    best: tuple[Tensor, Tensor] | None = None
    """(each place's most likely token, its logit), if the pass has computed them. Ties go to the lower token id. The
    logit is not finite if the place's logits have no distribution."""
    draw: Draw | None = None
    """Draws tokens instead of torch; see engine.batch.sampler."""
    rewind: Rewind | None = None
    """Set if the model has recurrent state and rows have drafts: it must be told how many of each row's tokens are
    kept."""

    @classmethod
    def by_head(
        cls, hidden: Tensor, sampled: Tensor, lm_head: Callable[[Tensor], Tensor], rewind: Rewind | None = None
    ) -> Computed:
        """Apply the LM head on the tensors' device. hidden: [num_tokens, hidden]; sampled: indices of the places'
        tokens, [places] int64; lm_head: hidden states [n, hidden] -> logits [n, vocab]."""

        def logits_at(index: Tensor) -> Tensor:
            return lm_head(hidden[index])

        return cls(hidden, logits_at(sampled), logits_at, rewind=rewind)


class Model(Protocol):
    """A model that runs steps, with the KV cache and the recurrent states that it reads and writes."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def state(self) -> RecurrentState | None:
        """The recurrent states; None if the model has none."""

    @property
    def adapters(self) -> AdapterHost | None:
        """The LoRA adapters; None if rows can have none."""

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        """Run a plan whose rows are in kernel order (see engine.batch.row_order). newest: by request, the token that
        its PENDING_TOKEN stands for.

        Raises:
            ValueError: a row breaks the contract of engine.step.
        """
