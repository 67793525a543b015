"""Owns packed integers as groups with scales and minima in float32, for formats with zero points.
Never rounds q: what a zero point takes away from it becomes the group's minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.packing import Unpacked
from kernels.cpu.native.grouped import Form, Grouped


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Outputs of a matrix: kernels.cpu.native.grouped.Rows."""

    grouped: Grouped

    @classmethod
    def of(cls, unpacked: Unpacked, form: Form) -> IntegerRows:
        """Take w = (q - zero) * scale as scale * (q - middle) + (middle - zero) * scale."""
        middle = unpacked.least + (1 << form.bits - 1)
        columns = unpacked.columns[:: form.run]
        scales = unpacked.scales[unpacked.rows][:, columns]
        zeros = 0.0 if unpacked.zeros is None else unpacked.zeros[unpacked.rows][:, columns]
        values = unpacked.values - middle + form.zero
        dtype = torch.int8 if form.bits == 8 else torch.uint8
        return cls(Grouped(form=form, values=values.to(dtype), scales=scales, minima=(middle - zeros) * scales))

    @property
    def form(self) -> Form:
        return self.grouped.form

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.grouped.values.shape
        return outputs, inputs

    def pack(self, rows: Tensor, panels: Tensor) -> None:
        panels.copy_(self.take(rows).panels())

    def take(self, rows: Tensor) -> Grouped:
        """Return these outputs, in this order."""
        own = self.grouped
        assert own.minima is not None
        return Grouped(form=own.form, values=own.values[rows], scales=own.scales[rows], minima=own.minima[rows])

    def above(self, other: IntegerRows) -> IntegerRows:
        """Stack the other's outputs below these, of the same form."""
        mine, theirs = self.grouped, other.grouped
        assert mine.minima is not None
        assert theirs.minima is not None
        values, scales, minima = (
            torch.cat(pair)
            for pair in ((mine.values, theirs.values), (mine.scales, theirs.scales), (mine.minima, theirs.minima))
        )
        return IntegerRows(Grouped(form=mine.form, values=values, scales=scales, minima=minima))
