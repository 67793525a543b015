"""Owns random linear-attention inputs for kernel tests: ragged rows, with unused state slots poisoned by NaN.
Never draws a seed: tests.support.seeds gives each test its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.eager.ops import Ops
from kernels.forward import LinearHeads
from kernels.rows.step import StateRows
from tests.kernels.rows import seeded_generator

HEADS = LinearHeads(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=12)
STEPS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode rows": ([5, 1, 64], []),
    "one decode row": ([3], []),
    "a whole prompt": ([], [(0, 70)]),
    "chunks of one token": ([], [(0, 1), (9, 1)]),
    "mixed": ([7], [(0, 2), (33, 37)]),
    "edges of tiles": ([7], [(0, 31), (9, 32), (33, 33), (5, 70), (4, 1)]),
    "ragged": ([7, 200], [(0, 2), (33, 5), (0, 130), (64, 64)]),
}
"""Contexts of decode rows; (context, count) of chunks."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of linear attention layers in one step."""

    heads: LinearHeads
    rows: StateRows
    qkv: Tensor
    strength: Tensor
    step: Tensor
    rates: tuple[Tensor, Tensor]
    conv: Tensor
    conv_state: Tensor
    state: Tensor

    def to(self, device: torch.device) -> Inputs:
        return replace(
            self,
            rows=replace(self.rows, index=self.rows.index.to(device)),
            qkv=self.qkv.to(device),
            strength=self.strength.to(device),
            step=self.step.to(device),
            rates=(self.rates[0].to(device), self.rates[1].to(device)),
            conv=self.conv.to(device),
            conv_state=self.conv_state.to(device),
            state=self.state.to(device),
        )

    def delta_rule(self, ops: Ops) -> tuple[Tensor, Tensor]:
        state = self.state.clone()
        given = (self.qkv, self.strength, self.step, self.rates, self.heads, state, self.rows)
        return ops.delta_rule(*given), state

    def causal_conv(self, ops: Ops) -> tuple[Tensor, Tensor]:
        state = self.conv_state.clone()
        return ops.causal_conv(self.qkv, self.conv, state, self.rows), state


def inputs(
    name: str, dtype: torch.dtype, *, side_by_side: bool = False, kernel: int = 4, heads: LinearHeads = HEADS
) -> Inputs:
    """Draw the inputs of step `name`. side_by_side: the rows have adjacent slots from 1 on, in any order, as when every
    running request has a row."""
    decodes, chunks = STEPS[name]
    generator = seeded_generator()
    contexts = (*decodes, *(context for context, _ in chunks))
    counts = (*(1 for _ in decodes), *(count for _, count in chunks))
    num_slots, num_tokens = len(contexts) + 3, sum(counts)
    slots = torch.randperm(len(contexts) if side_by_side else num_slots, generator=generator)[: len(contexts)]
    slots = slots + 1 if side_by_side else slots

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def states(*shape: int) -> Tensor:
        found = torch.full((num_slots, *shape), torch.nan)
        for slot, context in zip(slots.tolist(), contexts, strict=True):
            if context:
                found[slot] = normal(*shape)
        return found

    return Inputs(
        heads=heads,
        rows=StateRows(len(decodes), contexts, counts, tuple(slots.tolist()), slots),
        qkv=normal(num_tokens, heads.channels).to(dtype),
        strength=normal(num_tokens, heads.num_value_heads).to(dtype),
        step=normal(num_tokens, heads.num_value_heads).to(dtype),
        rates=(-normal(heads.num_value_heads).exp() / 4, normal(heads.num_value_heads)),
        conv=normal(heads.channels, kernel).to(dtype),
        conv_state=states(kernel - 1, heads.channels).to(dtype),
        state=states(heads.num_value_heads, heads.key_dim, heads.value_dim),
    )
