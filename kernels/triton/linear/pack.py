"""Owns the layout of narrow weights on a GPU: words of 16 bits, in which a tile's inputs are runs of sixteen.
Never rounds: the numbers are those that are stored, in another order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forward import NARROW_GROUP, Linear

RUN = NARROW_GROUP
"""Words beside each other whose first weights are of inputs beside each other, then the second ones, ..."""
INT8, FP8, INT4 = "int8", "fp8", "int4"
_KINDS = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.uint8: INT4}


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix of narrow weights. With p weights in a word, word j of run r has at place i, the lowest bits first, the
    weight of input (r * p + i) * RUN + j. int8 has 128 added."""

    words: Tensor
    """[outputs, ceil(inputs / (RUN * p)) * RUN] int16"""
    scales: Tensor
    """[groups, outputs] float32"""
    zeros: Tensor | None
    """[groups, outputs] int8. None: 8 for int4, else 0."""
    group: int
    """How many inputs share a scale; 0: all."""
    kind: str
    inputs: int

    @property
    def per_word(self) -> int:
        return 4 if self.kind == INT4 else 2


def pack(linear: Linear) -> Linear:
    """Return the same product for kernels.triton.linear.linear, the weight in the same memory where it fits there.

    linear: as kernels.forward.Linear describes a weight with scales.

    Raises:
        ValueError: a group is no multiple of 16 inputs.
    """
    if linear.group is not None and linear.group % RUN:
        raise ValueError(f"A group of {linear.group} inputs: expected a multiple of {RUN}.")
    stored: Tensor = linear.weight
    kind, outputs = _KINDS[stored.dtype], len(stored)
    numbers = stored.view(torch.uint8)
    if kind == INT4:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=2).flatten(1)
    elif kind == INT8:
        numbers = numbers ^ 0x80
    inputs, per_word = numbers.shape[1], 4 if kind == INT4 else 2
    runs = F.pad(numbers, (0, -inputs % (RUN * per_word))).view(outputs, -1, per_word, RUN)
    if kind == INT4:
        runs = runs[:, :, 0::2] | runs[:, :, 1::2] << 4
    words = runs.transpose(2, 3).contiguous().view(torch.int16).view(outputs, -1)
    if words.nbytes == stored.nbytes and stored.is_contiguous():
        words = stored.view(torch.int16).copy_(words)
    scales, zeros = (
        None if tensor is None else tensor.reshape(outputs, -1).t().contiguous()
        for tensor in (linear.scales, linear.zeros)
    )
    assert scales is not None
    packed = Packed(words, scales, zeros, linear.group or 0, kind, inputs)
    return replace(linear, weight=packed, scales=None, zeros=None, group=None)
