"""Owns weights of 4 to 8 bits in groups, integers and FP8: their forms, what they stand for, and their order in panels.
Never rounds, and never reads a file: whoever knows a file's format takes it apart into these fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.large_pages import Empty
from kernels.cpu.native.library import load_library

PANEL, LANES = 32, 16
BLOCK, NEST = 32, 256
"""The same as in grouped.h and forms.h."""
_SLICE = 1 << 24  # weights of all threads: to pack them takes some tens of MiB at a time, however large the matrix


@dataclass(frozen=True, slots=True)
class Form:
    """w = scale * (q - zero) + minimum, for each group of inputs. The same as in forms.h."""

    number: int
    bits: int
    zero: int
    group: int
    minimum: bool = False
    nested: bool = False
    """Whether scales and minima are bytes, in units of a float16 for 256 inputs. The minimum is then subtracted."""
    floats: int = 0
    """How many inputs share a scale of float32, and a minimum where there is one. 0: scales are float16, or nested."""
    fp8: bool = False
    """Whether q is a number of FP8 e4m3, and no integer."""

    @property
    def run(self) -> int:
        """How many inputs are stored together: a matrix has a multiple of them."""
        return self.floats or (NEST if self.nested else BLOCK)

    @property
    def panel_bytes(self) -> int:
        """The bytes of a run of 32 outputs."""
        kinds = 2 if self.minimum else 1
        scales = self.run // self.group + (self.run // BLOCK if self.minimum else 0) if self.nested else 0
        return PANEL * ((4 if self.floats else 2) * kinds + scales + self.run * self.bits // 8)

    @property
    def panel_bits(self) -> float:
        """The bits of a weight, with its share of scales and minima."""
        return 8 * self.panel_bytes / (PANEL * self.run)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix in panels."""
        return -(-outputs // PANEL) * (inputs // self.run) * self.panel_bytes


FORMS = {
    "Q4_0": Form(0, 4, 8, 32),
    "Q4_1": Form(1, 4, 0, 32, minimum=True),
    "Q5_0": Form(2, 5, 16, 32),
    "Q5_1": Form(3, 5, 0, 32, minimum=True),
    "Q8_0": Form(4, 8, 0, 32),
    "Q4_K": Form(5, 4, 0, 32, minimum=True, nested=True),
    "Q5_K": Form(6, 5, 0, 32, minimum=True, nested=True),
    "Q6_K": Form(7, 6, 32, 16, nested=True),
}
"""By the names that GGUF files give them."""
INTEGERS = {
    (4, 32): Form(8, 4, 8, 32, minimum=True, floats=32),
    (4, 128): Form(9, 4, 8, 32, minimum=True, floats=128),
    (8, 32): Form(10, 8, 0, 32, minimum=True, floats=32),
    (8, 128): Form(11, 8, 0, 32, minimum=True, floats=128),
}
"""By bits, and how many inputs share a scale: packed integers of other files, whose zero points make minima."""
FP8 = {
    32: Form(12, 8, 0, 32, floats=32, fp8=True),
    128: Form(13, 8, 0, 32, floats=128, fp8=True),
}
"""By how many inputs share a scale, at the least."""


def fitting(form: Form, inputs: int) -> Form | None:
    """Return the form for a matrix of so many inputs: with shorter runs where its own do not divide them, if scales are
    of float32. None: there is none."""
    if inputs % form.run == 0:
        return form
    if not form.floats or inputs % BLOCK:
        return None
    return FP8[BLOCK] if form.fp8 else INTEGERS[form.bits, BLOCK]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Some outputs of a matrix, each with as many inputs."""

    form: Form
    values: Tensor
    """[outputs, inputs] uint8: q. In 8 bits int8, or float8_e4m3fn."""
    scales: Tensor
    """[outputs, groups] float16; nested: int8; floats: [outputs, runs] float32"""
    minima: Tensor | None = None
    """[outputs, groups], as `scales`"""
    units: tuple[Tensor, ...] = ()
    """[outputs, runs] float16 of nested scales, and of minima"""

    def weight(self) -> Tensor:
        """Return what the numbers stand for. # [outputs, inputs] float32"""
        scales, minima = self.scales.float(), None if self.minima is None else self.minima.float()
        if self.form.floats:
            scales, minima = self._spread(scales), None if minima is None else self._spread(minima)
        if self.form.nested:
            scales = scales * self._per_group(0, scales)
            minima = None if minima is None else -(minima * self._per_group(1, minima))
        q = self.values.float().view(len(self.values), -1, self.form.group) - self.form.zero
        found: Tensor = q * scales.unsqueeze(2)
        return (found if minima is None else found + minima.unsqueeze(2)).flatten(1)

    def _spread(self, by_run: Tensor) -> Tensor:
        return by_run.repeat_interleave(self.form.run // self.form.group, 1)

    def _per_group(self, kind: int, groups: Tensor) -> Tensor:
        units = self.units[kind].float()
        return units.repeat_interleave(groups.shape[1] // units.shape[1], 1)

    def panels(self) -> Tensor:
        """Return the panels in forms.h's order; outputs are padded with zeros. # [panels, bytes] uint8"""
        runs = self.values.shape[1] // self.form.run
        scales = [self.scales] if self.minima is None else [self.scales, self.minima]
        halves, parts = (self.units, scales) if self.form.nested else (scales, [])
        found = [_by_panel(each, runs).view(torch.uint8) for each in halves]
        found += [_by_panel(each.view(torch.int8), runs).view(torch.uint8) for each in parts]
        blocks = _padded(self.values.view(torch.uint8)).view(-1, PANEL, runs, self.form.run // BLOCK, BLOCK)
        found += [_planes(blocks, self.form)]
        return torch.cat([each.flatten(2) for each in found], 2).flatten(1)


def _padded(values: Tensor) -> Tensor:
    return F.pad(values, (0, 0, 0, -len(values) % PANEL))


def _by_panel(values: Tensor, runs: int) -> Tensor:
    """[outputs, ...] -> [panels, runs, each, 32]"""
    return _padded(values).view(-1, PANEL, runs, values.shape[1] // runs).permute(0, 2, 3, 1).contiguous()


def _planes(q: Tensor, form: Form) -> Tensor:
    """Pack q: [panels, 32, runs, blocks, 32] -> [panels, runs, bytes]

    A word of 16 bits holds numbers of one output, of every second input: four in 4 bits each, and in a plane of its own
    the bits above these. Words of two neighbouring inputs lie beside each other, and pairs of 16 outputs in a vector.
    Of integers of 8 bits, the first input of 16 outputs comes before their second one; in FP8 both lie beside each
    other.
    """
    if form.bits == 8:
        steps = q.view(len(q), 2, LANES, *q.shape[2:4], 16, 2)  # [panels, c, lane, runs, blocks, step, half]
        return steps.permute(0, 3, 4, 5, 1, *((2, 6) if form.fp8 else (6, 2))).flatten(2)
    planes = [_plane(q & 15, 4)]
    if form.bits > 4:
        planes.append(_plane(q >> 4, form.bits - 4))
    return torch.cat(planes, 3).flatten(2)


def _plane(q: Tensor, bits: int) -> Tensor:
    """[panels, 32, runs, blocks, 32] -> [panels, runs, blocks, bytes]"""
    per_byte = 8 // bits
    by_word = q.view(*q.shape[:4], -1, 2, per_byte, 2)  # inputs: vector, byte of the word, place in the byte, half
    packed: Tensor = by_word[..., 0, :].clone()
    for place in range(1, per_byte):
        packed |= by_word[..., place, :] << place * bits
    by_lane = packed.view(len(q), 2, LANES, *packed.shape[2:])  # [panels, c, lane, runs, blocks, vector, byte, half]
    return by_lane.permute(0, 3, 4, 5, 1, 2, 7, 6).flatten(3)


class Rows(Protocol):
    """Outputs of a matrix in one form, in whatever format they are stored."""

    @property
    def form(self) -> Form: ...

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""

    def pack(self, rows: Tensor, panels: Tensor) -> None:
        """Fill `panels` with these outputs, in this order, and zeros: Grouped.panels. rows: [count] int64"""

    def above(self, other: Any) -> Rows:
        """Stack the outputs of another of the same kind and form below these."""

    def part(self, first: int, last: int) -> Rows:
        """Return the outputs [first, last), as they are stored."""


def pack_blocks(form: Form, blocks: Sequence[Tensor], rows: Tensor, panels: Tensor) -> None:
    """Fill `panels` with these outputs of a matrix in a GGUF file's blocks. Several threads may call it at once, each
    for panels of its own.

    blocks: [outputs, bytes] uint8 each, stacked; they may be columns of longer rows. rows: [count] int64.
    panels: [ceil(count / 32), bytes] uint8
    """
    assert all(part.stride(1) == 1 for part in blocks)
    assert panels.is_contiguous()
    runs = panels.shape[1] // form.panel_bytes
    assert panels.shape == (-(-len(rows) // PANEL), runs * form.panel_bytes)
    addresses = torch.cat([part.data_ptr() + torch.arange(len(part)) * part.stride(0) for part in blocks])[rows]
    load_library().pack_blocks(form.number, addresses.data_ptr(), runs, len(rows), panels.data_ptr())


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix in panels of 32 outputs each, which may differ in their form."""

    data: tuple[Tensor, ...]
    """[panels, bytes] uint8, for each part"""
    table: Tensor
    """[panels, 4] int64: the address, the form's number, the first output, and how many there are"""
    minima: bool
    """Whether any panel has minima."""


def panels_of(
    parts: Sequence[Rows], order: Tensor | None = None, *, num_threads: int = 1, empty: Empty = torch.empty
) -> Panels:
    """Pack parts that are stacked along the outputs. order: which output each row of the panels is, for a single part;
    None: as stored. num_threads: how many threads pack a matrix at the same time, in slices as much smaller. empty:
    allocates the panels."""
    assert order is None or len(parts) == 1
    data: list[Tensor] = []
    table, first = [], 0
    for part in parts:
        outputs, inputs = part.shape
        index = torch.arange(outputs) if order is None else order
        made = empty(-(-len(index) // PANEL), part.form.nbytes(PANEL, inputs), dtype=torch.uint8)
        step = max(1, _SLICE // num_threads // (PANEL * inputs))
        for panel in range(0, len(made), step):
            part.pack(index[panel * PANEL : (panel + step) * PANEL], made[panel : panel + step])
        firsts = torch.arange(0, len(made) * PANEL, PANEL)
        columns = (
            made.data_ptr() + firsts // PANEL * made.stride(0),
            torch.full_like(firsts, part.form.number),
            first + firsts,
            (len(index) - firsts).clamp(max=PANEL),
        )
        table.append(torch.stack(columns, 1))
        data.append(made)
        first += outputs
    return Panels(tuple(data), torch.cat(table), any(part.form.minimum for part in parts))
