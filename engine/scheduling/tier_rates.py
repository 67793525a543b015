"""Owns the measured speeds of tiers and of prefill, and the question whether loading KV is faster than computing it.
Never reads a clock, and decides nothing: the planner asks."""

from __future__ import annotations

import math

from engine.kv_tiers import MoveKind, MoveResult, Tier

RECENT = 32
"""Moves and steps after which an older one counts a third."""
FORGET_S = 60.0
"""A tier that was slow is believed half as slow after so long without a move, so that it is tried again."""


class _Ratio:
    """A ratio of two sums in which older values count less."""

    def __init__(self) -> None:
        self._over = self._under = 0.0

    def add(self, over: float, under: float) -> None:
        self._over += over - self._over / RECENT
        self._under += under - self._under / RECENT

    @property
    def value(self) -> float | None:
        return self._over / self._under if self._under > 0 else None


class TierRates:
    """Seconds a block by kind of move and tier, seconds a token of prompts, and seconds a step. Nothing is known at
    first: then a load is taken to cost nothing and a prompt any time, so that the first load is made, and measured."""

    def __init__(self) -> None:
        self._moves: dict[tuple[MoveKind, Tier], tuple[float, float]] = {}  # seconds a block, and as of when
        self._prompts = _Ratio()
        self._steps = _Ratio()

    def note_move(self, result: MoveResult, now: float) -> None:
        """Learn from a move that succeeded."""
        key = result.move.kind, result.move.tier
        known = self._moves.get(key)
        mean = result.seconds if known is None else self.move_s(*key, now)
        self._moves[key] = mean + (result.seconds - mean) / RECENT, now

    def note_late(self, tier: Tier, block_s: float, now: float) -> None:
        """Learn that loads from a tier did not end in time: a block takes `block_s` at least."""
        key = MoveKind.LOAD, tier
        self._moves[key] = max(self.move_s(*key, now), block_s), now

    def note_step(self, num_tokens: int, seconds: float, *, prefills: bool) -> None:
        """Learn from a step of so many tokens."""
        self._steps.add(seconds, 1.0)
        if prefills:  # by sums: a prompt's short rest takes nearly as long as a long chunk
            self._prompts.add(seconds, num_tokens)

    @property
    def step_s(self) -> float:
        """How long a step takes."""
        return self._steps.value or 0.0

    def move_s(self, kind: MoveKind, tier: Tier, now: float) -> float:
        """Predict how long one block takes."""
        mean, since = self._moves.get((kind, tier), (0.0, now))
        return mean * math.exp2(-max(now - since, 0.0) / FORGET_S)

    def prefill_s(self, num_tokens: int) -> float:
        """Return how long so many tokens of a prompt take; infinity if no step has told yet."""
        per_token = self._prompts.value
        return math.inf if per_token is None else per_token * num_tokens
