"""Owns the measured speeds of tiers and of prefill, and the question whether loading KV is faster than computing it.
Never reads a clock, and decides nothing: the planner asks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.kv_tiers import MoveKind, MoveResult, Tier

RECENT = 32
"""Moves and steps after which an older one counts a third."""
FORGET_S = 60.0
"""A tier that was slow is believed half as slow after so long without a move, so that it is tried again."""


class _Mean:
    """A mean in which older values count less."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) / RECENT


class TierRates:
    """Seconds a block by kind of move and tier, and seconds a token of prompts. Nothing is known at first: then a load
    is taken to cost nothing and a prompt any time, so that the first load is made, and measured."""

    def __init__(self) -> None:
        self._moves: dict[tuple[MoveKind, Tier], _Mean] = {}
        self._moved_at: dict[tuple[MoveKind, Tier], float] = {}
        self._prompt_token = _Mean()

    def note_move(self, result: MoveResult, now: float) -> None:
        """Learn from a move that succeeded."""
        key = result.move.kind, result.move.tier
        mean = self._moves.setdefault(key, _Mean())
        if mean.value is not None:
            mean.value = self._block_s(*key, now)
        mean.add(result.seconds)
        self._moved_at[key] = now

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step with prefill, of so many tokens."""
        self._prompt_token.add(seconds / num_tokens)

    def move_s(self, kind: MoveKind, tiers: Iterable[Tier], now: float) -> float:
        """Predict how long one block takes from or to each of `tiers`, together."""
        return sum(self._block_s(kind, tier, now) for tier in tiers)

    def prefill_s(self, num_tokens: int) -> float:
        """Return how long so many tokens of a prompt take; infinity if no step has told yet."""
        per_token = self._prompt_token.value
        return math.inf if per_token is None else per_token * num_tokens

    def _block_s(self, kind: MoveKind, tier: Tier, now: float) -> float:
        mean = self._moves.get((kind, tier))
        if mean is None or mean.value is None:
            return 0.0
        return mean.value * math.exp2(-max(now - self._moved_at[kind, tier], 0.0) / FORGET_S)
