"""Owns matrices in FP8 as groups with scales in float32: by tensor, by output or in blocks, they are scales of groups.
Never rounds: numbers and scales are those of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.packing import Unpacked
from kernels.cpu.native.grouped import Form, Grouped


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Outputs of a matrix: kernels.cpu.native.grouped.Rows."""

    form: Form
    numbers: Tensor
    """[outputs, inputs] uint8: the bits, since torch computes little with its type of FP8"""
    scales: Tensor
    """[outputs, runs] float32"""

    @classmethod
    def of(cls, unpacked: Unpacked, form: Form) -> Fp8Rows:
        """Take w = q * scale. Each run of the form's inputs has one scale."""
        numbers = unpacked.values.to(torch.float8_e4m3fn).view(torch.uint8)
        return cls(form, numbers, unpacked.scales[unpacked.rows][:, unpacked.columns[:: form.run]])

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.numbers.shape
        return outputs, inputs

    def pack(self, rows: Tensor, panels: Tensor) -> None:
        panels.copy_(self.take(rows).panels())

    def take(self, rows: Tensor) -> Grouped:
        """Return these outputs, in this order."""
        values = self.numbers[rows].view(torch.float8_e4m3fn)
        return Grouped(form=self.form, values=values, scales=self.scales[rows])

    def above(self, other: Fp8Rows) -> Fp8Rows:
        """Stack the other's outputs below these, of the same form."""
        numbers, scales = (torch.cat(pair) for pair in ((self.numbers, other.numbers), (self.scales, other.scales)))
        return Fp8Rows(self.form, numbers, scales)

    def part(self, first: int, last: int) -> Fp8Rows:
        """Return the outputs [first, last)."""
        return Fp8Rows(self.form, self.numbers[first:last], self.scales[first:last])
