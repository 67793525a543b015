"""Owns what an ingress replica counts of its way to the engines: frames, gaps, moves.
Never decides anything; whoever sees one of these adds to it, on the replica's event loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ChannelCounts:
    """Since the replica started."""

    frames: int = 0
    """Messages that came by the token channel."""
    gaps: int = 0
    """Streams that have lost a frame."""
    completions: int = 0
    """Streams that took their end from the call's answer, before the channel brought it."""
    migrations: int = 0
    """Times that a stream went on at another engine replica, or tried to."""
    failed_migrations: int = 0
    """Streams that lost their engine replica and ended with that."""
