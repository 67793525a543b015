"""Owns the tensors that make up a packed matrix, and which elements of them a part of the matrix needs.
Never knows a format: `engine.models.packing` lists the tensors of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis of a stored tensor runs along."""

    inputs: bool
    """Whether along the inputs; else the outputs."""
    step: int = 1
    """How many of them an element is for; 0: all."""
    width: int = 1
    """How many elements a step has."""
    groups: bool = False
    """Whether along groups of inputs, which need not lie in order where a checkpoint lists each input's group."""

    def slice(self, run: range) -> slice:
        """Return the elements of a run of outputs or inputs."""
        if not self.step:
            return slice(None)
        return slice(run.start // self.step * self.width, -(-run.stop // self.step) * self.width)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a checkpoint stores instead of a weight."""

    shape: tuple[int, ...]
    """Axes of size 1 may be left out."""
    kinds: tuple[str, ...]
    optional: bool = False
    axes: tuple[Axis, ...] = ()
    """Empty: it is the same for any part of the matrix."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

    def cut(self, tensor: Tensor, outputs: range, inputs: range, *, listed: bool) -> Tensor:
        """Return a view of what some outputs and inputs need, of the tensor of the whole matrix. listed: groups do not
        lie in order, so that any may be needed."""
        index = [
            slice(None) if axis.groups and listed else axis.slice(inputs if axis.inputs else outputs)
            for axis in self.axes
        ]
        return tensor.view(self.shape)[tuple(index)] if index else tensor


def widened(parts: Iterable[Part], run: range, total: int, *, inputs: bool, listed: bool) -> range:
    """Return the least run of outputs or inputs around `run` that begins and ends between elements of all parts."""
    axes = (axis for part in parts for axis in part.axes if axis.inputs is inputs and not (axis.groups and listed))
    step = math.lcm(*(axis.step for axis in axes if axis.step))
    return range(run.start // step * step, min(-(-run.stop // step) * step, total))
