"""Owns the error of a tier that could not keep or give back a block.
Never says what follows from it: a move that fails is a result, and its request is computed."""

from __future__ import annotations


class TierFault(Exception):
    """A block could not be stored or loaded. The message says why, for the log and the move's result."""
