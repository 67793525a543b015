"""Owns how matrices are held in fewer bits than activations: the layouts, which of them a device keeps, and rounding.
Never reads a file, and never multiplies: kernels.forward.Linear says what a stored number means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from engine.models.stored_matrix import StoredExperts, StoredMatrix
from kernels.cpu.large_pages import Empty
from kernels.cpu.native.grouped import Form
from kernels.forward import NARROW_GROUP, Linear


class Keep(Enum):
    """Which packed matrices kernels compute with as they are stored. All others are unpacked while they are loaded."""

    NOTHING = "nothing"
    BY_OUTPUT = "by output"
    """Those in int8 with a scale for each output, experts' too: the native kernels."""
    GROUPED = "grouped"
    """These, and those in groups of 4 to 8 bits: the native kernels with `quantize: stored`."""
    NARROW = "narrow"
    """All that kernels.forward.Linear describes, experts' too: Triton."""

    @property
    def by_output(self) -> bool:
        return self in (Keep.BY_OUTPUT, Keep.GROUPED)


@dataclass(frozen=True, slots=True)
class Narrow:
    """A layout of kernels.forward.Linear with fewer bits."""

    dtype: torch.dtype
    """int8, float8_e4m3fn, or uint8, which holds two weights of 4 bits."""
    group: int | None = None
    """How many inputs share a scale; None: all."""
    zeros: bool = False
    """Whether groups have zero points."""
    order: str = ""
    """Where a checkpoint lists each input's group: a digest of the list, or LISTED before it is read. Inputs are then
    stored by group. Empty: they lie in order already."""
    input_scale: bool = False
    """Whether activations are rounded for it, with a scale that the checkpoint may have."""

    @property
    def name(self) -> str:
        return layout_name(self.dtype)

    @property
    def why_not(self) -> str | None:
        """Why no kernel multiplies by it; None if one does."""
        if self.group is not None and self.group % NARROW_GROUP:
            return f"groups of {self.group} inputs are no multiple of {NARROW_GROUP}"
        return None

    def empty(self, *shape: int, bias: Tensor | None, device: torch.device | None, numbers: Empty) -> Linear:
        """Allocate a matrix, or one for each expert. shape: [..., outputs, inputs], `inputs` even. numbers: allocates
        them."""
        *outer, inputs = shape
        width = inputs // 2 if self.dtype == torch.uint8 else inputs
        groups = [] if self.group is None else [-(-inputs // self.group)]
        zeros = torch.empty(*outer, *(groups or [1]), dtype=torch.int8, device=device) if self.zeros else None
        scales = torch.empty(*outer, *groups, dtype=torch.float32, device=device)
        order = torch.empty(*outer[:-1], inputs, dtype=torch.int32, device=device) if self.order else None
        weight = numbers(*outer, width, dtype=self.dtype)
        own = torch.zeros(1, dtype=torch.float32, device=device) if self.input_scale and len(outer) == 1 else None
        return Linear(weight, bias, scales, zeros, self.group, order, own)

    def describes(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
        """Whether a matrix allocated for one of the layouts of its model has this one."""
        by_group, has_zeros = scales.dim() == 2, zeros is not None
        return (weight.dtype, by_group, has_zeros) == (self.dtype, self.group is not None, self.zeros)


@dataclass(frozen=True, slots=True)
class InBlocks:
    """A layout in which a matrix stays in groups of 4 to 8 bits."""

    form: Form

    def empty(self, *shape: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device | None) -> Linear:
        """Return a matrix to be filled, or one for each expert. shape: [..., outputs, inputs]."""
        *experts, outputs, inputs = shape
        on = device or torch.device("cpu")
        found = [StoredMatrix(outputs, inputs, self.form, dtype, on) for _ in range(*experts or (1,))]
        return Linear(StoredExperts(tuple(found)) if experts else found[0], bias)


INT8 = Narrow(torch.int8)
"""The layout to which matrices are rounded: a scale for each output."""
LISTED = "listed"
"""The order of a layout whose list of groups is not read yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a model's weights are allocated for."""

    modules: Mapping[str, Narrow | InBlocks] = field(default_factory=dict)
    """The layouts of modules, by their names in the checkpoint. A stacked matrix has one only if all its modules have
    the same, or all are in blocks."""
    rounded: bool = False
    """Whether all other matrices have INT8."""

    def layout(self, modules: Sequence[str]) -> Narrow | InBlocks | None:
        """Return the layout of a matrix that is stacked from these modules; None: it has the type of activations."""
        found = {self.modules.get(module) for module in modules}
        if blocks := [layout for layout in found if isinstance(layout, InBlocks)]:
            return max(blocks, key=lambda layout: layout.form.panel_bits) if len(blocks) == len(found) else None
        layout = found.pop() if len(found) == 1 else None
        return INT8 if layout is None and self.rounded else layout

    def experts_layout(self, experts: Sequence[Sequence[str]]) -> Narrow | InBlocks | None:
        """Return the layout of the matrices of all experts, each stacked from its own modules. Each may have its own
        order of inputs, or blocks of its own."""
        found = [self.layout(modules) for modules in experts]
        if (blocks := self._experts_blocks(experts)) is not None:
            return blocks
        alike = {replace(layout, order="") if isinstance(layout, Narrow) else layout for layout in found}
        layout = alike.pop() if len(alike) == 1 else None
        if not isinstance(layout, Narrow):
            return INT8 if self.rounded else None
        orders = [each.order for each in found if isinstance(each, Narrow)]
        return layout if not any(orders) else replace(layout, order=LISTED)

    def _experts_blocks(self, experts: Sequence[Sequence[str]]) -> InBlocks | None:
        """Return the largest of the experts' layouts in blocks; None: one is not, or has modules of two formats, whose
        outputs no panel can have beside each other."""
        found = [{self.modules.get(module) for module in modules} for modules in experts]
        blocks = [layout for own in found if len(own) == 1 for layout in own if isinstance(layout, InBlocks)]
        return max(blocks, key=lambda layout: layout.form.panel_bits) if len(blocks) == len(experts) else None


def layout_name(dtype: torch.dtype) -> str:
    """Return what a reader of the log calls weights of this type."""
    names = {torch.int8: "8 bits", torch.uint8: "4 bits", torch.float8_e4m3fn: "fp8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def num_inputs(weight: Tensor) -> int:
    """Return the inputs of a matrix [..., outputs, width]; uint8 holds two weights."""
    width = weight.shape[-1]
    return 2 * width if weight.dtype == torch.uint8 else width


def round_by_output(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to INT8: the largest magnitude of each output becomes 127. weight: [outputs, inputs]. # int8, [outputs]"""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    units = wide / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return units.round_().to(torch.int8), scales


def split_outputs(stacked: Linear, sizes: Sequence[int]) -> list[Linear]:
    """Return views of these numbers of outputs. What all outputs share is in each."""
    tensors = (stacked.weight, stacked.bias, stacked.scales, stacked.zeros)
    parts = [[None] * len(sizes) if tensor is None else tensor.split(list(sizes)) for tensor in tensors]
    return [
        Linear(weight, bias, scales, zeros, stacked.group, stacked.order, stacked.input_scale)
        for weight, bias, scales, zeros in zip(*parts, strict=True)
    ]


def take_views(module: str, missing: dict[str, Tensor]) -> Linear:
    """Remove a module's views from a checkpoint's table, and return them; a weight of None: there are none."""
    weight, scales, zeros, order, input_scale = (
        missing.pop(f"{module}.{part}", None) for part in ("weight", *NARROW_PARTS)
    )
    return Linear(weight, None, scales, zeros, order=order, input_scale=input_scale)


SHARED_PARTS = ("weight_order", "input_scale")
"""What all parts of a stacked matrix share."""
NARROW_PARTS = ("weight_scale", "weight_zeros", *SHARED_PARTS)
"""What the table of a checkpoint's names calls the scales, zeros, order and scale of inputs of a module."""
