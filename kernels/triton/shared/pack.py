"""Owns the layout of weights on a GPU: words of 16 bits, in which a tile's inputs are runs of sixteen.
Never rounds: the numbers are those that are stored, in another order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forward import NARROW_GROUP, Linear

RUN = NARROW_GROUP
"""Words beside each other whose first weights are of inputs beside each other, then the second ones, ..."""
PLAIN, INT8, FP8, INT4 = "plain", "int8", "fp8", "int4"
"""PLAIN: the type of activations, one weight in a word and nothing reordered."""
_KINDS = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.uint8: INT4}
_PER_WORD = {PLAIN: 1, INT8: 2, FP8: 2, INT4: 4}


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix, or one for each expert. With p weights in a word, word j of run r has at place i, the lowest bits
    first, the weight of input (r * p + i) * RUN + j. int8 has 128 added."""

    words: Tensor
    """[..., outputs, ceil(inputs / (RUN * p)) * RUN] int16; of PLAIN: [..., outputs, inputs]"""
    scales: Tensor | None
    """[..., groups, outputs] float32. None: PLAIN."""
    zeros: Tensor | None
    """[..., groups, outputs] int8. None: 8 for int4, else 0."""
    group: int
    """How many inputs share a scale; 0: all."""
    kind: str
    inputs: int

    @property
    def per_word(self) -> int:
        return _PER_WORD[self.kind]

    @property
    def group_step(self) -> int:
        """The largest power of two that divides `group`."""
        return self.group & -self.group


def plain(weight: Tensor) -> Packed:
    """Return a weight in the type of activations as kernels take it. weight: [..., outputs, inputs], contiguous."""
    return Packed(weight, None, None, 0, PLAIN, weight.shape[-1])


def pack(linear: Linear) -> Linear:
    """Return the same product for the kernels, the weight in the same memory where it fits there.

    linear: as kernels.forward.Linear describes a weight with scales, or one for each expert.

    Raises:
        ValueError: a group is no multiple of 16 inputs.
    """
    if linear.group is not None and linear.group % RUN:
        raise ValueError(f"A group of {linear.group} inputs: expected a multiple of {RUN}.")
    packed = _pack_experts(linear) if linear.weight.dim() == 3 else _pack(linear)
    return replace(linear, weight=packed, scales=None, zeros=None, group=None)


def _pack_experts(linear: Linear) -> Packed:
    """Pack one expert after the other: what is needed beside the weights themselves is that of one."""
    stored: Tensor = linear.weight
    own = [_pack(linear.of_expert(number)) for number in range(len(stored))]
    first = own[0]
    in_place = first.words.data_ptr() == stored.data_ptr()
    return replace(
        first,
        words=stored.view(torch.int16) if in_place else torch.stack([packed.words for packed in own]),
        scales=torch.stack([packed.scales for packed in own if packed.scales is not None]),
        zeros=None if first.zeros is None else torch.stack([each.zeros for each in own if each.zeros is not None]),
    )


def _pack(linear: Linear) -> Packed:
    stored: Tensor = linear.weight
    kind, outputs = _KINDS[stored.dtype], len(stored)
    numbers = stored.view(torch.uint8)
    if kind == INT4:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=2).flatten(1)
    elif kind == INT8:
        numbers = numbers ^ 0x80
    inputs, per_word = numbers.shape[1], _PER_WORD[kind]
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
    return Packed(words, scales, zeros, linear.group or 0, kind, inputs)
