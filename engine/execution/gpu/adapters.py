"""Owns the LoRA adapters in a device's memory: slots reserved at the start, and which adapter is in which.
Never waits for the device: whoever fills a slot queues a copy behind the steps that still read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.execution.device import Device
from engine.models.adapter_files import read_factors
from engine.models.adapter_slots import SlotLayout
from engine.models.decoder import Decoder
from engine.models.description import ModelConfig
from engine.step import ScheduledRequest
from kernels.eager.ops import AddLowRank, Ops
from kernels.forward import Linear, LowRankStack
from kernels.rows.adapter_tokens import NO_SLOT, AdapterTokens

_TRIAL = "trial"
"""No digest: those are hexadecimal."""


def slots_bytes(model: ModelConfig, dtype: torch.dtype, *, num_slots: int, max_rank: int) -> int:
    """Return the bytes that AdapterSlots of these sizes takes of the device."""
    return num_slots * SlotLayout(model, max_rank).size * dtype.itemsize


class AdapterSlots:
    """An engine.step.AdapterHost, and the stacks that kernels read.

    `keep` copies into a slot that no adapter has. Steps that were launched before may still read it, for the adapter
    that was dropped: they are earlier in the device's one queue, whichever thread queued them, and so is the copy
    before all steps whose rows name the new adapter.
    """

    def __init__(self, decoder: Decoder, ops: Ops, device: Device, *, num_slots: int, max_rank: int) -> None:
        assert ops.add_low_rank is not None
        self._model, self._dtype, self._device, self._max_rank = decoder.config, decoder.dtype, device, max_rank
        self._add = ops.add_low_rank
        self._layout = SlotLayout(decoder.config, max_rank)
        self._memory = torch.zeros(num_slots, self._layout.size, dtype=decoder.dtype, device=device.torch_device)
        layers, stacks = decoder.weights.layers, self._layout.views(self._memory)
        self._stacks = {id(getattr(layers[layer], name)): stack for (layer, name), stack in stacks.items()}
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))

    # --- engine.step.AdapterHost --------------------------------------------------------------------------------------

    def read(self, path: str) -> tuple[str, Tensor]:
        digest, factors = read_factors(Path(path), self._model, self._dtype, self._max_rank)
        return digest, self._device.staged(self._layout.pack(factors, self._dtype))

    def keep(self, digest: str, weights: Tensor) -> None:
        slot = self._free.pop()
        self._device.upload(weights, self._memory[slot])
        self._slots[digest] = slot  # only now may a row name it

    def drop(self, digest: str) -> None:
        self._free.append(self._slots.pop(digest))

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return len(self._memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, with an adapter or without."""
        return self._memory.nbytes

    def slots_of(self, rows: Sequence[ScheduledRequest]) -> tuple[int, ...]:
        """Return each row's slot, NO_SLOT for a row without an adapter; () if no row has one.

        Raises:
            ValueError: a row's adapter is in no slot.
        """
        if not any(row.adapter for row in rows):
            return ()
        if lost := next((row.adapter for row in rows if row.adapter and row.adapter not in self._slots), None):
            raise ValueError(f"A row needs the adapter {lost}, which was not kept.")
        return tuple(self._slots[row.adapter] if row.adapter else NO_SLOT for row in rows)

    def step(self, tokens: AdapterTokens) -> StepAdapters:
        return StepAdapters(self._add, self._stacks, tokens)

    @contextmanager
    def trial(self) -> Iterator[str]:
        """Keep an adapter of zeros for the steps in the body; yields its name."""
        self._slots[_TRIAL] = self._free.pop()
        try:
            yield _TRIAL
        finally:
            self.drop(_TRIAL)


class StepAdapters:
    """The kernels.eager.forward.Adapters of a step: all of its adapters in two launches for each matrix."""

    def __init__(self, add: AddLowRank, stacks: Mapping[int, LowRankStack], tokens: AdapterTokens) -> None:
        """stacks: by the id of the Linear that they add to."""
        self._add, self._stacks, self._tokens = add, stacks, tokens

    def add(self, y: Tensor, x: Tensor, linear: Linear) -> None:
        if (stack := self._stacks.get(id(linear))) is not None:
            self._add(y, x, stack, self._tokens)
