"""Owns the second half of a step with drafts on the native kernels: states advance past accepted tokens alone.
Never computes: a recorded program does, on what the step's own program has copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from engine.models.description import ModelConfig
from engine.step import RowKind, ScheduledRequest
from kernels.cpu.native.program import StepRows


def drafted_rows(rows: Sequence[ScheduledRequest]) -> range:
    """Return the rows with drafts, which in kernel order are neighbours; see engine.batch.row_order."""
    numbers = [i for i, row in enumerate(rows) if row.kind is RowKind.DECODE and len(row.token_ids) > 1]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def rewind_bytes(model: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes that drafts take in a model with states: each layer keeps what tokens of rows with drafts give
    to its states, and one layer after another computes on that. num_tokens: of rows with drafts in a step. dtype: the
    activations'."""
    layers = model.linear_layers
    if not layers:
        return 0
    inputs = [2 * layer.channels + 2 * layer.heads.num_value_heads for layer in layers]
    heads = layers[0].heads
    results = layers[0].channels + heads.value_size
    prepared = 2 * heads.key_size + heads.num_key_heads + 2 * heads.num_value_heads  # in float32
    at_once = (max(inputs) + results) * dtype.itemsize + prepared * torch.float32.itemsize
    return num_tokens * (sum(inputs) * dtype.itemsize + at_once)


class NativeRewind:
    """An engine.models.computed.Rewind. The step has left the states of rows with drafts as they were."""

    def __init__(
        self, run: Callable[[StepRows], None], rows: Sequence[ScheduledRequest], drafted: range, block_size: int
    ) -> None:
        """run: runs the program of kernels.cpu.native.linear_attention.Rewind."""
        self._run = run
        self._rows = [rows[number] for number in drafted]
        self._drafted = drafted
        self._block_size = block_size

    def to(self, counts: Sequence[int]) -> None:
        kept = [counts[number] for number in self._drafted]
        begins = accumulate((len(row.token_ids) for row in self._rows), initial=0)  # among the copied tokens
        going_on = [(row, count, begin) for row, count, begin in zip(self._rows, kept, begins, strict=False) if count]
        if not going_on:
            return
        rows, accepted = [row for row, _, _ in going_on], [count for _, count, _ in going_on]
        self._run(
            StepRows(
                [row.token_ids[:count] for row, count, _ in going_on],
                [row.start for row in rows],
                accepted,
                [row.block_ids[: -(-row.end // self._block_size)] for row in rows],
                [begin + offset for _, count, begin in going_on for offset in range(count)],
                [row.state.slot for row in rows if row.state is not None],
            )
        )
