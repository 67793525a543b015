"""Owns the embeddings of the contents that prompts show beside text, and where a step's rows take them from.
Never decides what is encoded or dropped: plans say so, and a row whose input is not encoded breaks their contract."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.vision import VisionEncoder
from engine.multimodal_inputs import PlacedInput
from engine.step import StepPlan


class Filled(NamedTuple):
    """Tokens [begin, end) of a step, all of one row, are those of an input from its token `first` on. They have these
    embeddings instead of those of their ids. # [end - begin, hidden]"""

    begin: int
    end: int
    first: int
    placed: PlacedInput
    embeddings: Tensor


class Contents:
    """What plans have had encoded and not dropped."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self.encoder = encoder
        self.embeddings: dict[bytes, Tensor] = {}
        """By digest. # each [tokens, hidden]"""

    def axis_of_pair(self) -> Tensor:
        """Return by which of a token's frame, row and column each pair of a head is rotated. # [head_dim / 2] int64"""
        return torch.arange(3).repeat_interleave(torch.tensor(self.encoder.config.position_sections))

    def update(self, plan: StepPlan) -> None:
        """Drop and encode what the plan says."""
        for digest in plan.dropped:
            self.embeddings.pop(digest, None)
        for work in plan.encodes:
            self.embeddings[work.digest] = self.encoder.encode(work.grid, work.data)

    def filled(self, plan: StepPlan) -> list[Filled]:
        """Return the step's spans of inputs, in order.

        Raises:
            ValueError: a row's input was not encoded.
        """
        found = []
        for row, begin in zip(plan.rows, row_begins(plan), strict=True):
            for one in row.inputs.placed if row.inputs else ():
                if one.digest not in self.embeddings:
                    raise ValueError(f"Row {row.request_id}: its input at {one.start} was not encoded.")
                first, last = max(one.start, row.start), min(one.end, row.end)
                embeddings = self.embeddings[one.digest][first - one.start : last - one.start]
                place = begin - row.start
                found.append(Filled(place + first, place + last, first - one.start, one, embeddings))
        return found


def row_begins(plan: StepPlan) -> list[int]:
    """Return the index of each row's first token within the step."""
    return list(accumulate((len(row.token_ids) for row in plan.rows[:-1]), initial=0))
