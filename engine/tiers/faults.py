"""Owns the error of a tier that did not store or load a block.
Never says that an engine is broken: the block is computed again."""

from __future__ import annotations


class TierFault(Exception):
    """A block was not stored or not loaded. The message names the file, and says why."""
