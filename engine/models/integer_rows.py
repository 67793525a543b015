"""Owns packed integers as groups with scales and minima in float32, for formats with zero points.
Never rounds q: what a zero point takes away from it becomes the group's minimum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.models.packing import Unpacked
from kernels.cpu.native.grouped import Form, Grouped


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Outputs of a matrix: kernels.cpu.native.grouped.Rows. They take no more memory than their panels, since a whole
    model is in memory like this before the first matrix is packed."""

    form: Form
    numbers: Tensor
    """[outputs, inputs] int8: q; of 4 bits [outputs, inputs / 2] uint8, with an even input in the lower half"""
    scales: Tensor
    """[outputs, runs] float32"""
    minima: Tensor
    """[outputs, runs] float32"""

    @classmethod
    def of(cls, unpacked: Unpacked, form: Form) -> IntegerRows:
        """Take w = (q - zero) * scale as scale * (q - middle) + (middle - zero) * scale."""
        middle = unpacked.least + (1 << form.bits - 1)
        columns = unpacked.columns[:: form.run]
        scales = unpacked.scales[unpacked.rows][:, columns]
        zeros = 0.0 if unpacked.zeros is None else unpacked.zeros[unpacked.rows][:, columns]
        values = unpacked.values - middle + form.zero
        return cls(form, _in_bytes(values, form), scales, (middle - zeros) * scales)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.numbers.shape
        return outputs, width * 8 // self.form.bits

    def pack(self, rows: Tensor, panels: Tensor) -> None:
        panels.copy_(self.take(rows).panels())

    def take(self, rows: Tensor) -> Grouped:
        """Return these outputs, in this order."""
        values = self.numbers[rows]
        if self.form.bits == 4:
            values = torch.stack((values & 15, values >> 4), 2).flatten(1)
        return Grouped(form=self.form, values=values, scales=self.scales[rows], minima=self.minima[rows])

    def above(self, other: IntegerRows) -> IntegerRows:
        """Stack the other's outputs below these, of the same form."""
        numbers, scales, minima = (
            torch.cat(pair)
            for pair in ((self.numbers, other.numbers), (self.scales, other.scales), (self.minima, other.minima))
        )
        return replace(self, numbers=numbers, scales=scales, minima=minima)

    def part(self, first: int, last: int) -> IntegerRows:
        """Return the outputs [first, last)."""
        numbers, scales, minima = (part[first:last] for part in (self.numbers, self.scales, self.minima))
        return replace(self, numbers=numbers, scales=scales, minima=minima)


def _in_bytes(values: Tensor, form: Form) -> Tensor:
    """Return q as IntegerRows.numbers has it. values: [outputs, inputs] float32, `inputs` even"""
    if form.bits == 8:
        return values.to(torch.int8)
    halves = values.to(torch.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << 4
