"""Owns the blocks of GGUF's formats: which numbers lie where in them.
Never rounds: q, scales and minima are taken out as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.native.grouped import FORMS, Form, Grouped, pack_blocks

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Bytes of a block, which has as many inputs as the form's run."""


def row_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of a row. Raises ValueError if it has no whole number of blocks."""
    if inputs % FORMS[kind].run:
        raise ValueError(f"{inputs} inputs are no multiple of {FORMS[kind].run}, which blocks of {kind} have")
    return inputs // FORMS[kind].run * BLOCK_BYTES[kind]


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Outputs of a matrix as a GGUF file stores them: kernels.cpu.native.grouped.Rows."""

    kind: str
    blocks: Tensor
    """[outputs, bytes] uint8"""
    below: tuple[Tensor, ...] = ()
    """The same of matrices that are stacked below this one, each where it was read."""

    @property
    def form(self) -> Form:
        return FORMS[self.kind]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, size = sum(len(part) for part in self._parts), self.blocks.shape[1]
        return outputs, size // BLOCK_BYTES[self.kind] * self.form.run

    def above(self, other: GgufRows) -> GgufRows:
        """Stack the other's outputs below these, of the same format."""
        return GgufRows(self.kind, self.blocks, (*self.below, *other._parts))

    def part(self, first: int, last: int) -> GgufRows:
        """Return the outputs [first, last), where they were read."""
        assert not self.below, "of what is not stacked"
        return GgufRows(self.kind, self.blocks[first:last])

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.blocks, *self.below

    def pack(self, rows: Tensor, panels: Tensor) -> None:
        pack_blocks(self.form, self._parts, rows, panels)

    def take(self, rows: Tensor) -> Grouped:
        """Return these outputs, in this order."""
        blocks = torch.cat(self._parts)[rows].view(len(rows), -1, BLOCK_BYTES[self.kind])  # [outputs, blocks, bytes]
        if self.kind == "Q6_K":
            return _q6_k(self.form, blocks)
        return (_k_quants if self.form.nested else _plain)(self.form, blocks)


def _halves(blocks: Tensor, first: int, count: int) -> Tensor:
    """Return numbers of 16 bits from byte `first` on. # [outputs, blocks, count] float16"""
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16)


def _plain(form: Form, blocks: Tensor) -> Grouped:
    """A scale, a minimum where there is one, bits above the fourth where there are any, and 32 numbers: the first 16 in
    the lower halves of bytes."""
    scales = _halves(blocks, 0, 1)[..., 0]
    minima = _halves(blocks, 2, 1)[..., 0] if form.minimum else None
    rest = blocks[..., 4 if form.minimum else 2 :]
    if form.bits == 8:
        return Grouped(form=form, values=rest.contiguous().view(torch.int8).flatten(1), scales=scales)
    low = rest[..., -16:]
    values = torch.cat((low & 15, low >> 4), 2)
    if form.bits == 5:
        bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        values |= (rest[..., :4].unsqueeze(3) >> bits & 1).flatten(2) << 4
    return Grouped(form=form, values=values.flatten(1), scales=scales, minima=minima)


def _k_quants(form: Form, blocks: Tensor) -> Grouped:
    """Two units, 8 scales and 8 minima of 6 bits, the fifth bits of 256 numbers where there are any, and the others."""
    units = _halves(blocks, 0, 2)
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, last & 15 | first >> 2 & 48), 2)
    minima = torch.cat((second & 63, last >> 4 | second >> 2 & 48), 2)
    low = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)
    values = torch.stack((low & 15, low >> 4), 3).flatten(2, 3)  # [outputs, blocks, 8, 32]
    if form.bits == 5:
        bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
        values |= (blocks[..., 16:48].unsqueeze(2) >> bits & 1) << 4
    return Grouped(
        form=form,
        values=values.flatten(1),
        scales=scales.flatten(1).view(torch.int8),
        minima=minima.flatten(1).view(torch.int8),
        units=(units[..., 0].contiguous(), units[..., 1].contiguous()),
    )


def _q6_k(form: Form, blocks: Tensor) -> Grouped:
    """The lower 4 bits of 256 numbers, the upper 2, 16 scales, and their unit."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)  # [4, 1]
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64) >> shifts[::2]
    # [outputs, blocks, 2, 4, 32], as `low` once flat
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts
    values = (low & 15).flatten(2) | (high & 3).flatten(2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    unit = _halves(blocks, 208, 1)[..., 0]
    return Grouped(form=form, values=values.flatten(1), scales=scales.flatten(1), units=(unit,))
