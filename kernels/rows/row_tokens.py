"""Owns which tokens the texts of a step's rows have, as counts on the device, for controls that look back.
Never says how a control uses them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of each row's prompt and answer. All tensors are on the device of the logits."""

    counts: Tensor
    """[slots, vocab] int32: twice how often the token occurs in the answer, plus 1 if it occurs in the prompt"""
    slots: Tensor
    """[rows] int64: where each row's counts are; -1: the row has no penalties"""
    latest: Tensor
    """[rows, width] int64: tokens at the answer's end that are not in `counts`; -1: none. The first may have been
    sampled by a step that the host has not read. Then the row has no other here, and it is the row's newest token."""
