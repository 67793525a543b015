"""Owns the layouts of packed matrices: which tensors a checkpoint stores instead of a weight, and how to unpack them.
Never rounds: a weight is (q - zero) * scale in float32, as its format defines it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.models.gguf_rows import BLOCK_BYTES, GgufRows, row_bytes
from engine.models.narrow import LISTED, Narrow
from engine.models.stored_parts import Axis, Part
from kernels.cpu.native.grouped import FORMS

INT8, INT32, FP8, BYTES = "I8", "I32", "F8_E4M3", "U8"
"""Types, as safetensors spells them."""
_SCALES = ("F16", "BF16", "F32")
SHAPE = "weight_shape"
"""A part that has the matrix's outputs and inputs."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight outputs, which group of four bits in an int32 holds it."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An unpacked matrix: each value is to be multiplied by the scale of its output and input."""

    values: Tensor
    """[outputs, inputs] float32: q"""
    least: int
    """The least value that q can have."""
    scales: Tensor
    """[rows, columns] float32"""
    rows: Tensor
    """[outputs]: each output's row of `scales`"""
    columns: Tensor
    """[inputs]: each input's column of `scales`"""
    zeros: Tensor | None = None
    """[rows, columns] float32; None: all 0"""

    @property
    def _less_zero(self) -> Tensor:
        return self.values if self.zeros is None else self.values - self.zeros[self.rows][:, self.columns]

    def weight(self) -> Tensor:
        """Return the matrix itself. # [outputs, inputs] float32"""
        return self._less_zero * self.scales[self.rows][:, self.columns]

    def part(self, outputs: slice, inputs: slice) -> Unpacked:
        """Return some of the outputs and inputs, with the groups that these inputs are in."""
        used, columns = torch.unique(self.columns[inputs], return_inverse=True)
        zeros = None if self.zeros is None else self.zeros[:, used]
        return Unpacked(
            self.values[outputs, inputs], self.least, self.scales[:, used], self.rows[outputs], columns, zeros
        )

    def by_group(self) -> tuple[Unpacked, Tensor]:
        """Return the same with its inputs sorted by their groups, and where each was. # [inputs] int32"""
        order = self.columns.argsort(stable=True)
        return replace(self, values=self.values[:, order], columns=self.columns[order]), order.int()

    def as_stored(self, layout: Narrow) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the weight, its scales, its zeros and its order as kernels.forward.Linear has them.

        Raises:
            ValueError: a value less its zero point does not fit into 8 bits, and the layout has no zero points.
        """
        if not layout.order:
            return *self._as_stored(layout), None
        ordered, order = self.by_group()
        return *ordered._as_stored(layout), order

    def _as_stored(self, layout: Narrow) -> tuple[Tensor, Tensor, Tensor | None]:
        scales = self.scales[self.rows, 0] if layout.group is None else self.scales[self.rows]
        if layout.dtype == torch.float8_e4m3fn:
            return self.values.to(layout.dtype), scales, None
        if layout.dtype == torch.uint8:
            numbers = (self.values - self.least).to(torch.uint8)
            zeros = None if self.zeros is None else (self.zeros[self.rows] - self.least).to(torch.int8)
            return numbers[:, 0::2] | numbers[:, 1::2] << 4, scales, zeros
        if layout.zeros and self.zeros is not None:
            shift = self.least + 128
            return (self.values - shift).to(torch.int8), scales, (self.zeros[self.rows] - shift).to(torch.int8)
        values = self._less_zero
        if values.min() < -128 or values.max() > 127:
            raise ValueError("a value less its zero point is beyond 8 bits")
        return values.to(torch.int8), scales, None


class Packing(Protocol):
    """How one matrix is stored. Sizes are those of the weight: outputs and inputs."""

    @property
    def summary(self) -> str:
        """A description for messages."""

    @property
    def main(self) -> str:
        """The part that holds the values."""

    @property
    def by_output(self) -> bool:
        """Whether values have 8 bits and no zero points, and each output has one scale. All kernels with 8 bits use it
        as stored."""

    @property
    def group(self) -> int | None:
        """How many inputs share a scale or lie in a block; None: all."""

    def narrow(self, *, zeros: bool) -> Narrow | str:
        """Return the layout in which a GPU's kernels use it as stored, its order LISTED where the format lists groups,
        or why there is none. zeros: whether a checkpoint has zero points although the format makes them optional."""

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """Return the stored parts by name. Raises ValueError if a matrix of this size cannot be packed in this way."""

    def unpack(self, parts: Mapping[str, Tensor], outputs: int, inputs: int) -> Unpacked:
        """Unpack the tensors that `parts` lists. Raises ValueError if numbers contradict each other; its text begins
        with the part's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One value per element, or several per int32, and a scale per cell of a grid: `compressed-tensors`, `fp8`."""

    summary: str
    kind: str
    """INT8 or FP8: each element is a value. INT32: each holds as many values of `bits` as fit, the first in the lowest
    bits."""
    bits: int = 8
    cell: tuple[int | None, int | None]
    """How many outputs and inputs share a scale; None: all."""
    scale: str = "weight_scale"
    other_scale: str = ""
    """What a checkpoint may call the scale instead."""
    zero_points: bool = False
    ordered: bool = False
    """Whether `weight_g_idx` says which scale an input has."""

    @property
    def main(self) -> str:
        return "weight_packed" if self.kind == INT32 else "weight"

    @property
    def by_output(self) -> bool:
        plain = self.kind != FP8 and self.bits == 8 and not self.zero_points
        return plain and self.cell[1] is None and self.cell[0] in (1, None)

    @property
    def group(self) -> int | None:
        return self.cell[1]

    def narrow(self, *, zeros: bool) -> Narrow | str:
        if self.kind == FP8:
            return Narrow(torch.float8_e4m3fn, self.cell[1])
        dtype, order = torch.uint8 if self.bits == 4 else torch.int8, LISTED if self.ordered else ""
        return Narrow(dtype, self.cell[1], zeros or self.zero_points, order)

    @property
    def _per_int(self) -> int:
        return 32 // self.bits

    def _sizes(self, outputs: int, inputs: int) -> tuple[int, int]:
        return -(-outputs // (self.cell[0] or outputs)), -(-inputs // (self.cell[1] or inputs))

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        rows, columns = self._sizes(outputs, inputs)
        high, per_int = self.cell[0] or 0, self._per_int
        row, column = Axis(False, high), Axis(True, self.cell[1] or 0, groups=True)
        found = {self.scale: Part((rows, columns), _SCALES, axes=(row, column))}
        optional = not self.zero_points
        if self.kind != INT32:
            found["weight"] = Part((outputs, inputs), (self.kind,), axes=(Axis(False), Axis(True)))
            if self.kind == INT8:
                found["weight_zero_point"] = Part((rows, columns), (INT8,), optional, (row, column))
        else:
            axes = Axis(False), Axis(True, per_int)
            found["weight_packed"] = Part((outputs, -(-inputs // per_int)), (INT32,), axes=axes)
            found[SHAPE] = Part((2,), (INT32, "I64"))
            axes = Axis(False, high * per_int), column
            found["weight_zero_point"] = Part((-(-rows // per_int), columns), (INT32,), optional, axes)
        if self.ordered:
            found["weight_g_idx"] = Part((inputs,), (INT32, "I64"), axes=(Axis(True),))
        return found

    def unpack(self, parts: Mapping[str, Tensor], outputs: int, inputs: int) -> Unpacked:
        rows, _ = self._sizes(outputs, inputs)
        sizes = rows, parts[self.scale].numel() // rows
        values, zeros = parts[self.main], parts.get("weight_zero_point")
        if self.kind == INT32:
            values = self._from_int32(values)[:, :inputs]
            zeros = None if zeros is None else self._from_int32(zeros.view(-1, sizes[1]).T)[:, : sizes[0]].T
        of_output = torch.arange(outputs, device=values.device) // (self.cell[0] or outputs)
        columns = torch.arange(inputs, device=values.device) // (self.cell[1] or inputs)
        if self.ordered and not bool((parts["weight_g_idx"] == -1).all()):
            columns = checked_groups("weight_g_idx", parts["weight_g_idx"], sizes[1])
        points = None if zeros is None else zeros.reshape(sizes).float()
        return Unpacked(
            values.float(), -(1 << self.bits - 1), parts[self.scale].float().view(sizes), of_output, columns, points
        )

    def _from_int32(self, packed: Tensor) -> Tensor:
        """Unpack [rows, n] to [rows, n * per_int], signed. Values are stored with half their range added."""
        return bits_of(packed, self.bits).flatten(1) - (1 << self.bits - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """[inputs, outputs], several inputs per int32 (arXiv 2210.17323)."""

    bits: int
    group_size: int | None
    """None: all inputs."""
    ordered: bool
    """Whether inputs were grouped by importance; `g_idx` then says which group each input is in."""
    zeros_less_one: bool
    """Whether zero points are stored minus one, as in the format's first version."""
    symmetric: bool
    """Whether all zero points are the middle of the values' range."""

    @property
    def summary(self) -> str:
        return f"gptq {self.bits} bit, {_inputs_a_scale(self.group_size)}"

    @property
    def main(self) -> str:
        return "qweight"

    @property
    def by_output(self) -> bool:
        return self.bits == 8 and self.group_size is None and self.symmetric

    @property
    def group(self) -> int | None:
        return self.group_size

    def narrow(self, *, zeros: bool) -> Narrow | str:
        order = LISTED if self.ordered and self.group_size is not None else ""
        return Narrow(torch.uint8 if self.bits == 4 else torch.int8, self.group_size, True, order)

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        per_int, groups = 32 // self.bits, -(-inputs // (self.group_size or inputs))
        for name, size in (("inputs", inputs), ("outputs", outputs)):
            if size % per_int:
                raise ValueError(f"{size} {name} is not a multiple of {per_int}, which int32 packing needs")
        group, packed = Axis(True, self.group_size or 0, groups=True), Axis(False, per_int)
        return {
            "qweight": Part((inputs // per_int, outputs), (INT32,), axes=(Axis(True, per_int), Axis(False))),
            "qzeros": Part((groups, outputs // per_int), (INT32,), axes=(group, packed)),
            "scales": Part((groups, outputs), _SCALES, axes=(group, Axis(False))),
            "g_idx": Part((inputs,), (INT32, "I64"), not self.ordered, (Axis(True),)),
        }

    def unpack(self, parts: Mapping[str, Tensor], outputs: int, inputs: int) -> Unpacked:
        qweight, scales = parts["qweight"], parts["scales"].float().view(-1, outputs).T
        columns = torch.arange(inputs, device=qweight.device) // (self.group_size or inputs)
        if "g_idx" in parts:
            columns = checked_groups("g_idx", parts["g_idx"], scales.shape[1])
        values = bits_of(qweight.view(-1, outputs).T, self.bits).flatten(1)
        zeros = bits_of(parts["qzeros"].view(scales.shape[1], -1), self.bits).flatten(1)
        if self.zeros_less_one:  # 0 is stored with all bits set
            zeros = (zeros + 1) & (1 << self.bits) - 1
        rows = torch.arange(outputs, device=qweight.device)
        return Unpacked(values.float(), 0, scales, rows, columns, zeros.T.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """[inputs, outputs] of 4 bits, eight outputs per int32 in a special order (arXiv 2306.00978, `gemm`)."""

    group_size: int | None

    @property
    def summary(self) -> str:
        return f"awq 4 bit, {_inputs_a_scale(self.group_size)}"

    @property
    def main(self) -> str:
        return "qweight"

    @property
    def by_output(self) -> bool:
        return False

    @property
    def group(self) -> int | None:
        return self.group_size

    def narrow(self, *, zeros: bool) -> Narrow | str:
        return Narrow(torch.uint8, self.group_size, zeros=True)

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        groups = -(-inputs // (self.group_size or inputs))
        if outputs % 8:
            raise ValueError(f"{outputs} outputs is not a multiple of 8, which int32 packing needs")
        group, packed = Axis(True, self.group_size or 0, groups=True), Axis(False, 8)
        return {
            "qweight": Part((inputs, outputs // 8), (INT32,), axes=(Axis(True), packed)),
            "qzeros": Part((groups, outputs // 8), (INT32,), axes=(group, packed)),
            "scales": Part((groups, outputs), _SCALES, axes=(group, Axis(False))),
        }

    def unpack(self, parts: Mapping[str, Tensor], outputs: int, inputs: int) -> Unpacked:
        qweight = parts["qweight"].view(inputs, -1)
        rows = torch.arange(outputs, device=qweight.device)
        columns = torch.arange(inputs, device=qweight.device) // (self.group_size or inputs)
        values, zeros = (
            bits_of(tensor.view(-1, outputs // 8), 4)[..., list(_AWQ_ORDER)].flatten(1).T
            for tensor in (qweight, parts["qzeros"])
        )
        scales = parts["scales"].float().view(-1, outputs).T
        return Unpacked(values.float(), 0, scales, rows, columns, zeros.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """Rows of blocks as in a GGUF file, in Hugging Face's order (`engine.checkpoints.gguf_convert`)."""

    kind: str

    @property
    def summary(self) -> str:
        return f"gguf {self.kind}"

    @property
    def main(self) -> str:
        return "weight"

    @property
    def by_output(self) -> bool:
        return False

    @property
    def group(self) -> int | None:
        return FORMS[self.kind].run

    def narrow(self, *, zeros: bool) -> Narrow | str:
        return "only the native kernels compute with blocks of GGUF's formats"

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        axes = Axis(False), Axis(True, FORMS[self.kind].run, BLOCK_BYTES[self.kind])
        return {"weight": Part((outputs, row_bytes(self.kind, inputs)), (BYTES,), axes=axes)}

    def unpack(self, parts: Mapping[str, Tensor], outputs: int, inputs: int) -> Unpacked:
        """Unpack to the weights themselves: their minima are no whole numbers of scales."""
        rows = GgufRows(self.kind, parts["weight"])
        values = rows.take(torch.arange(outputs, device=parts["weight"].device)).weight()
        once, every = (torch.zeros(size, dtype=torch.int64, device=values.device) for size in (outputs, inputs))
        return Unpacked(values, 0, torch.ones(1, 1, device=values.device), once, every)


def bits_of(packed: Tensor, bits: int) -> Tensor:
    """Split integers: [...] int32 -> [..., 32 / bits] int32, the lowest bits first, none negative."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return packed.unsqueeze(-1) >> shifts & (1 << bits) - 1


def checked_groups(name: str, found: Tensor, count: int) -> Tensor:
    """Return `found` as indices. Raises ValueError if it names a group that does not exist."""
    if bool((found < 0).any()) or bool((found >= count).any()):
        raise ValueError(f"{name} names groups {int(found.min())} to {int(found.max())}, and there are {count}")
    return found.long()


def _inputs_a_scale(size: int | None) -> str:
    return "a scale for each output" if size is None else f"a scale for {size} inputs of an output"
