"""Owns how LoRA adapters lie in slots of one size: for each layer and matrix A and B, with zeros beyond the own rank.
Never copies to a device, and never says which adapter is in which slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.adapter_files import Factors, Place, stack_outputs, stacked_b, stacked_places
from engine.models.description import ModelConfig
from kernels.forward import LowRankStack

RANKS_AT_A_TIME = 16
"""Ranks of a slot are a multiple of it: the least that a tensor core multiplies."""
ALIGNED = 64
"""Elements. Each A and B begins at a multiple of it, so that kernels copy 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """A layer's matrix within a slot: A [parts, ranks, inputs] from element `a` on, B [outputs, ranks] from `b` on."""

    parts: tuple[Place, ...]
    outputs: int
    a: int
    b: int

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs


class SlotLayout:
    """The layout of a slot that any adapter of up to `max_rank` fits. Slots do not grow with what an adapter adapts."""

    def __init__(self, model: ModelConfig, max_rank: int) -> None:
        self._model = model
        self.ranks = -(-max_rank // RANKS_AT_A_TIME) * RANKS_AT_A_TIME
        self.size = 0
        """Elements of a slot."""
        self._stacks = {key: self._next_stack(key[1], parts) for key, parts in stacked_places(model).items()}

    def _next_stack(self, stack: str, parts: tuple[Place, ...]) -> _Stack:
        outputs = stack_outputs(stack, self._model)
        assert sum(part.outputs for part in parts) == outputs, "parts do not overlap"
        a, b = self._take(len(parts) * self.ranks * parts[0].inputs), self._take(outputs * self.ranks)
        return _Stack(parts, outputs, a, b)

    def _take(self, size: int) -> int:
        begin = self.size
        self.size += -(-size // ALIGNED) * ALIGNED
        return begin

    def pack(self, factors: Mapping[Place, Factors], dtype: torch.dtype) -> Tensor:
        """Return an adapter as a slot holds it, on the CPU. # [size]"""
        packed = torch.zeros(1, self.size, dtype=dtype)
        for stack in self._stacks.values():
            view = self._view(packed, stack)
            for number, place in enumerate(stack.parts):
                if (own := factors.get(place)) is not None:
                    view.a[0, number, : len(own.a)] = own.a
            view.b[0] = stacked_b(self._model, stack.parts, factors, self.ranks)
        return packed[0]

    def views(self, memory: Tensor) -> dict[tuple[int, str], LowRankStack]:
        """Return the stacks of all slots, by layer and matrix (see adapter_files.STACKS). memory: [slots, size]"""
        return {key: self._view(memory, stack) for key, stack in self._stacks.items()}

    def _view(self, memory: Tensor, stack: _Stack) -> LowRankStack:
        num_slots, parts = len(memory), len(stack.parts)
        a = memory[:, stack.a : stack.a + parts * self.ranks * stack.inputs]
        b = memory[:, stack.b : stack.b + stack.outputs * self.ranks]
        return LowRankStack(
            a.view(num_slots, parts, self.ranks, stack.inputs),
            b.view(num_slots, stack.outputs, self.ranks),
            tuple(part.first for part in stack.parts),
        )
