"""Owns everything that choosing a row's token takes besides its logits, as numbers that any backend can pack.
Never sees a logit."""

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
    allowed: Sequence[int] | None = None
    bias: Sequence[tuple[int, float]] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: Sequence[Sequence[int]] = ()
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
