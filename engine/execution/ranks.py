"""Owns what an executor needs of the other ranks that compute its model: their state for metrics, and their end.
Never starts one: engine.build does."""

from __future__ import annotations

from typing import Protocol

from engine.step import RankStatus


class Ranks(RankStatus, Protocol):
    """The ranks that compute a model, as the leader has them."""

    def end(self) -> None:
        """End the others."""
