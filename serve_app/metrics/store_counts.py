"""Owns what an ingress replica counts of the answers that are kept: how many, how large, and how often one is found.
Never decides anything; whoever uses the store adds to it, on the replica's event loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounts:
    """The first two are of the whole store, as it was when this replica last used it."""

    num_entries: int = 0
    num_bytes: int = 0
    queries: int = 0
    """Lookups since the replica started."""
    hits: int = 0
    """Those of which all was found."""

    def looked_up(self, *, is_found: bool) -> None:
        self.queries += 1
        self.hits += is_found
