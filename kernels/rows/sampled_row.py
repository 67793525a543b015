"""Owns everything that choosing a row's token takes besides its logits, as numbers that any backend can pack.
Never sees a logit, nor a row's text: kernels.rows.row_tokens counts that on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """How to choose one row's token; `kernels.reference` gives each field's meaning."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """The random number depends on this and `position` alone, on 64 bits of each."""
    position: int = 0
    banned: Sequence[int] = ()
    banned_after: Sequence[tuple[int, int]] = ()
    """(newest, token): the token is banned if the first of the row's `RowTokens.latest` is `newest`."""
    allowed: Sequence[int] | None = None
    bias: Sequence[tuple[int, float]] = ()
    """Each token once."""
    repetition_penalty: float = 1.0
    """This and the next two need the row's counts; see kernels.rows.row_tokens."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the row needs its `RowTokens`."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.banned_after)

    @property
    def is_controlled(self) -> bool:
        """Whether anything but a grammar changes the row's logits."""
        return self.looks_back or bool(self.banned or self.bias) or self.allowed is not None
