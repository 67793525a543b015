"""Owns the loading of packed weights: several tensors of the checkpoint make up each matrix.
Never knows a format (`engine.models.packing` does), and never takes a tensor that does not fit, but refuses it by
name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import CheckpointError
from engine.models.cuts import Cut, Cuts
from engine.models.fp8_rows import Fp8Rows
from engine.models.gguf_rows import GgufRows
from engine.models.integer_rows import IntegerRows
from engine.models.narrow import InBlocks, Narrow, num_inputs, round_by_output, split_outputs, take_views
from engine.models.packing import BYTES, FP8, INT8, SHAPE, Gguf, Grid, Packing, Unpacked
from engine.models.quantization import Quantization
from engine.models.stored_matrix import StoredMatrix
from engine.models.stored_parts import Part, widened
from engine.models.tensor_files import TensorNames
from kernels.cpu.native.grouped import Form, Rows, fitting
from kernels.forward import Linear

_NARROW = (INT8, FP8, "F8_E5M2", BYTES)
_INPUT_SCALES = ("input_scale", "activation_scale")
_UNUSED = (*_INPUT_SCALES, "input_zero_point", "output_scale", "activation_scale_ub")
"""Scales for rounding activations. Ignored where activations are not rounded."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Stored:
    """All tensors of a checkpoint, read only on demand."""

    files: Mapping[str, tuple[Path, Any, str]]
    """Tensor name in the family's table -> (the file that holds it, the opened file, its name there)."""

    @classmethod
    @contextmanager
    def open(cls, names: TensorNames, device: torch.device) -> Iterator[Stored]:
        """Open all files. Raises CheckpointError if one is not a readable safetensors file."""
        found: dict[str, tuple[Path, Any, str]] = {}
        with ExitStack() as opened:
            for file, held in names.items():
                tensors = _reading(file, partial(safe_open, file, framework="pt", device=str(device)))
                opened.enter_context(tensors)
                found |= {own: (file, tensors, stored) for stored, own in held.items()}
            yield cls(found)

    def kind(self, name: str) -> str:
        """Return the tensor's type, as safetensors spells it."""
        file, tensors, stored = self.files[name]
        return str(_reading(file, lambda: tensors.get_slice(stored).get_dtype()))

    def shape(self, name: str) -> tuple[int, ...]:
        file, tensors, stored = self.files[name]
        return tuple(_reading(file, lambda: tensors.get_slice(stored).get_shape()))

    def read(self, name: str) -> Tensor:
        file, tensors, stored = self.files[name]
        found: Tensor = _reading(file, lambda: tensors.get_tensor(stored))
        return found


def _reading(file: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}.") from error


def find_packed(stored: Stored, quantization: Quantization) -> dict[str, Packing]:
    """Return the packing of each packed module, by name. A module is packed if the checkpoint has any part of a packing
    for it.

    Raises:
        CheckpointError: a module is packed, but the config says that it is not.
    """
    parts = {
        part
        for _, packing in quantization.groups
        for part in packing.parts(*_ANY_SIZE)
        if part != "weight"  # unpacked matrices have one, too
    }
    found: dict[str, Packing] = {}
    for name, (file, _, stored_name) in stored.files.items():
        module, _, part = name.rpartition(".")
        if part not in parts and not (part == "weight" and stored.kind(name) in _NARROW):
            continue
        stored_module = stored_name.rpartition(".")[0]
        packing = quantization.packing(stored_module)
        if packing is None:
            raise CheckpointError(
                f"{file}: {stored_name} is quantized, but quantization_config does not cover {stored_module}."
            )
        found[module] = _with_stored_scale(stored, module, packing)
    return found


def _with_stored_scale(stored: Stored, module: str, packing: Packing) -> Packing:
    """Return the packing with the name that the checkpoint has for a module's scale."""
    if not isinstance(packing, Grid) or f"{module}.{packing.scale}" in stored.files:
        return packing
    return replace(packing, scale=packing.other_scale) if f"{module}.{packing.other_scale}" in stored.files else packing


def with_order(stored: Stored, module: str, layout: Narrow, inputs: range | None = None) -> Narrow | None:
    """Return the layout with the order of inputs that the checkpoint lists; None: a group has more or fewer inputs than
    the format says. inputs: those that this rank has; None: all."""
    listed = next((name for part in _GROUP_LISTS if (name := f"{module}.{part}") in stored.files), None)
    if layout.group is None or listed is None:
        return replace(layout, order="")
    found = stored.read(listed).flatten()[slice(None) if inputs is None else slice(inputs.start, inputs.stop)]
    if bool((found == NO_GROUPS).all()):
        return replace(layout, order="")
    if inputs is not None:  # their groups are counted from the first that they are in
        found = torch.unique(found, return_inverse=True)[1]
    in_order = torch.arange(found.numel(), device=found.device) // layout.group
    if bool((found == in_order).all()):
        return replace(layout, order="")
    if not bool((found.sort().values == in_order).all()):
        return None
    return replace(layout, order=hashlib.sha256(found.cpu().int().numpy().tobytes()).hexdigest())


_GROUP_LISTS = ("g_idx", "weight_g_idx")
"""The parts that say which group each input is in."""
NO_GROUPS = -1
"""In place of every group: the list says nothing."""
_ANY_SIZE = (256, 256)
"""Any matrix size will do, because the names of the parts do not depend on it."""


def fill_packed(
    stored: Stored,
    packed: Mapping[str, Packing],
    layouts: Mapping[str, Narrow | InBlocks],
    missing: dict[str, Tensor],
    cuts: Cuts,
    shapes: Mapping[str, tuple[int, ...]],
) -> frozenset[str]:
    """Fill those weights of `missing` that are packed, and remove them from it. Return the names of the tensors used.

    layouts: of the modules whose values are kept as stored. A narrow view of another layout gets weights rounded anew.
    cuts: this rank's part of each matrix; shapes: of the tensors of those that are cut, before they are.

    Raises:
        CheckpointError: a part is missing, of another shape or type, or contradicts another.
    """
    taken: set[str] = set()
    for module, packing in packed.items():
        views = take_views(module, missing)
        view: Tensor | StoredMatrix | None = views.weight
        if view is None:
            continue  # the reader of the other tensors decides whether it may be left over
        if isinstance(view, Tensor) and view.dim() != 2:
            raise CheckpointError(f"{module} is packed ({packing.summary}), but its weight is not two-dimensional.")
        outputs, inputs = shapes.get(
            f"{module}.weight", (len(view), view.inputs if isinstance(view, StoredMatrix) else num_inputs(view))
        )
        parts, names = _read_parts(stored, module, packing, (outputs, inputs))
        matrix = _Matrix(packing, parts, outputs, inputs)
        try:
            for own, run in _pieces(views, cuts.of_module(module)):
                _fill_piece(matrix, run, cuts.of_module(module).inputs, layouts.get(module), own)
            _take_input_scale(stored, module, views.input_scale)
        except ValueError as error:
            raise CheckpointError(f"{_file(stored, module, packing)}: {module}.{error} ({packing.summary}).") from error
        taken |= names | _leftovers(stored, module, missing)
    return frozenset(taken)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A whole matrix as it is stored."""

    packing: Packing
    parts: Mapping[str, Tensor]
    """Still in the file's pages on a CPU, so that only what is cut out of them takes memory."""
    outputs: int
    inputs: int

    def cut(self, outputs: range | None, inputs: range | None) -> tuple[dict[str, Tensor], range, range]:
        """Return the parts of the least matrix around some outputs and inputs, which of the whole's outputs these are,
        and which inputs. None: all."""
        every = range(self.outputs), range(self.inputs)
        if outputs is None and inputs is None:
            return dict(self.parts), *every
        listed = any(part in self.parts and bool((self.parts[part] != NO_GROUPS).any()) for part in _GROUP_LISTS)
        wanted = {
            part: found for part, found in self.packing.parts(self.outputs, self.inputs).items() if part in self.parts
        }
        rows = widened(wanted.values(), outputs or every[0], self.outputs, inputs=False, listed=listed)
        columns = widened(wanted.values(), inputs or every[1], self.inputs, inputs=True, listed=listed)
        found = {name: part.cut(self.parts[name], rows, columns, listed=listed) for name, part in wanted.items()}
        return found, rows, columns

    def unpack(self, outputs: range | None, inputs: range | None) -> Unpacked:
        """Unpack some outputs and inputs; None: all."""
        parts, rows, columns = self.cut(outputs, inputs)
        parts = {name: part.contiguous() for name, part in parts.items()}
        unpacked = self.packing.unpack(parts, len(rows), len(columns))
        if outputs is None and inputs is None:
            return unpacked
        return unpacked.part(_within(outputs or rows, rows), _within(inputs or columns, columns))


def _within(run: range, around: range) -> slice:
    return slice(run.start - around.start, run.stop - around.start)


def _pieces(views: Linear, cut: Cut) -> Sequence[tuple[Linear, range | None]]:
    """Return views of a rank's matrix and the outputs of the whole matrix that they are; None: all."""
    if cut.outputs is None:
        return [(views, None)]
    return list(zip(split_outputs(views, [len(run) for run in cut.outputs]), cut.outputs, strict=True))


def _fill_piece(
    matrix: _Matrix, outputs: range | None, inputs: range | None, layout: Narrow | InBlocks | None, views: Linear
) -> None:
    view: Tensor | StoredMatrix = views.weight
    if isinstance(view, StoredMatrix):
        assert isinstance(layout, InBlocks), "all modules of a stack in blocks are"
        view.fill(_rows(matrix, outputs, inputs, layout.form, view))
    else:
        _fill(matrix.unpack(outputs, inputs), layout, views)


def _rows(matrix: _Matrix, outputs: range | None, inputs: range | None, form: Form, view: StoredMatrix) -> Rows:
    """Return a matrix that stays in groups."""
    if isinstance(matrix.packing, Gguf):
        return GgufRows(matrix.packing.kind, matrix.cut(outputs, inputs)[0]["weight"])
    own = fitting(form, view.inputs)
    assert own is not None
    unpacked = matrix.unpack(outputs, inputs)
    return Fp8Rows.of(unpacked, own) if own.fp8 else IntegerRows.of(unpacked, own)


def _fill(unpacked: Unpacked, layout: Narrow | InBlocks | None, views: Linear) -> None:
    """Fill one matrix. layout: as the values are stored; None: they cannot be kept."""
    view, scales, zeros = views.weight, views.scales, views.zeros
    if scales is None:
        view.copy_(unpacked.weight())
    elif not isinstance(layout, Narrow) or not layout.describes(view, scales, zeros):
        _copy((view, scales), round_by_output(unpacked.weight()))
    elif layout.order or views.order is None:
        _copy((view, scales, zeros, views.order), unpacked.as_stored(layout))
    else:  # an expert whose inputs lie in order, beside others whose do not
        order = torch.arange(num_inputs(view), dtype=torch.int32, device=view.device)
        _copy((view, scales, zeros, views.order), (*unpacked.as_stored(layout)[:3], order))


def _take_input_scale(stored: Stored, module: str, view: Tensor | None) -> None:
    """Enlarge the scale of a stack's inputs to what one of its modules says: none of them is cut off then.

    Raises:
        ValueError: it is no scale.
    """
    part = next((part for part in _INPUT_SCALES if f"{module}.{part}" in stored.files), None)
    if view is None or part is None:
        return
    found = stored.read(f"{module}.{part}").float().max()
    if not 0 < float(found) < float("inf"):
        raise ValueError(f"{part} is {float(found):g}: expected a positive number")
    view.copy_(torch.maximum(view, found))


def _copy(views: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> None:
    for view, tensor in zip(views, tensors, strict=True):
        if view is not None and tensor is not None:
            view.view(tensor.shape).copy_(tensor)


def _read_parts(
    stored: Stored, module: str, packing: Packing, shape: tuple[int, int]
) -> tuple[dict[str, Tensor], set[str]]:
    """Read the parts of one matrix [outputs, inputs]. Return them by part, and their full names."""
    try:
        wanted = packing.parts(*shape)
    except ValueError as error:
        raise CheckpointError(f"{module} cannot be packed ({packing.summary}): {error}.") from error
    parts: dict[str, Tensor] = {}
    for part, expected in wanted.items():
        name = f"{module}.{part}"
        if name in stored.files:
            _check(stored, name, expected, packing)
            parts[part] = stored.read(name)
            if part == SHAPE and (told := parts[part].tolist()) != list(shape):
                raise CheckpointError(
                    f"{_file(stored, module, packing)}: {name} is {told}, but config.json says {list(shape)} "
                    f"({packing.summary})."
                )
            if parts[part].dtype.is_floating_point and not bool(parts[part].float().isfinite().all()):
                raise CheckpointError(f"{stored.files[name][0]}: {name} has numbers that are not finite.")
        elif not expected.optional:
            raise CheckpointError(
                f"{_file(stored, module, packing)}: {name} is missing, which {packing.summary} needs for "
                f"{module}.{packing.main}."
            )
    return parts, {f"{module}.{part}" for part in parts}


def _check(stored: Stored, name: str, expected: Part, packing: Packing) -> None:
    shape, kind, file = stored.shape(name), stored.kind(name), stored.files[name][0]
    if not expected.fits(shape):
        raise CheckpointError(
            f"{file}: {name} has shape {list(shape)}, but {packing.summary} has {list(expected.shape)}."
        )
    if kind not in expected.kinds:
        raise CheckpointError(f"{file}: {name} is {kind}; {packing.summary} has {', '.join(expected.kinds)}.")


def _leftovers(stored: Stored, module: str, missing: Mapping[str, Tensor]) -> set[str]:
    """Return a module's other tensors that change nothing: scales of activations, and an all-zero bias where the model
    has none, which some packers write for every matrix."""
    found = {f"{module}.{name}" for name in _UNUSED} & stored.files.keys()
    bias = f"{module}.bias"
    if bias in stored.files and bias not in missing and not bool(stored.read(bias).any()):
        found.add(bias)
    return found


def _file(stored: Stored, module: str, packing: Packing) -> str:
    """Return the file that holds a matrix, or any part of it."""
    parts = [packing.main, *packing.parts(*_ANY_SIZE)]
    return str(next(stored.files[name][0] for part in parts if (name := f"{module}.{part}") in stored.files))
