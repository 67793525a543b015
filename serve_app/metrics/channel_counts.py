"""Owns an ingress replica's counts of its connection to the engines: frames, gaps, moves.
Never decides anything: the code that sees an event adds to its count, on the replica's event loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ChannelCounts:
    """Counts since the replica started."""

    frames: int = 0
    """Messages that came through the token channel."""
    gaps: int = 0
    """Streams that lost a frame."""
    completions: int = 0
    """Streams that got their end from the call's answer before the channel delivered it."""
    migrations: int = 0
    """How often a stream continued at another engine replica, or tried to."""
    failed_migrations: int = 0
    """Streams that lost their engine replica and could not continue."""
