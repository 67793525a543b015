"""Owns the memory of recurrent states: a slot per running request, and snapshots, in every layer that has states.
Never knows which request has a slot: the scheduler assigns slots, and a plan says what to copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig, ResolvedConfig, SchedulerConfig
from engine.models.description import ModelConfig
from engine.step import StepPlan


def bytes_per_slot(model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one request's states in all layers; 0 for a model without states. dtype: the activations'."""
    return sum(
        (linear.kernel - 1) * linear.channels * dtype.itemsize
        + linear.heads.num_value_heads * linear.heads.key_dim * linear.heads.value_dim * torch.float32.itemsize
        for linear in model.linear_layers
    )


def num_snapshots(scheduler: SchedulerConfig) -> int:
    return scheduler.state_snapshots if scheduler.state_snapshot_tokens else 0


def state_bytes(model: ModelConfig, config: EngineConfig | ResolvedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of all slots and snapshots."""
    return bytes_per_slot(model, dtype) * (config.max_num_seqs + num_snapshots(config.scheduler))


def memory_summary(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> str:
    """Describe how much memory the states take, and whether there can be prefix hits."""
    size, snapshots = bytes_per_slot(model, dtype), num_snapshots(config.scheduler)
    stride = config.scheduler.state_snapshot_tokens
    kept = f"{snapshots} snapshots, one every {stride} tokens, which prefix hits start from"
    none = "no snapshots, and so no prefix hits: state_snapshot_tokens is 0"
    return (
        f"{size} bytes for each of {config.max_num_seqs} requests, and {kept if snapshots else none}; "
        f"{state_bytes(model, config, dtype) / 2**30:.2f} GiB"
    )


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """States by slot: slots 0 to num_slots - 1 are for running requests, and snapshots follow.

    A slot's content before its request's first token is never read: a row that starts at 0 starts from zeros.
    """

    conv: Tensor  # [layers, slots, kernel - 1, channels]: a request's last inputs of the convolution
    delta: Tensor  # [layers, slots, value heads, key_dim, value_dim] float32
    num_slots: int

    @classmethod
    def allocate(
        cls, model: ModelConfig, config: ResolvedConfig, dtype: torch.dtype, device: torch.device | None = None
    ) -> RecurrentState | None:
        """Allocate zeroed memory, which touches every page. None for a model without states."""
        layers = model.linear_layers
        if not layers:
            return None
        linear, num_slots = layers[0], config.max_num_seqs
        slots = num_slots + num_snapshots(config.scheduler)
        heads = linear.heads
        return cls(
            torch.zeros(len(layers), slots, linear.kernel - 1, linear.channels, dtype=dtype, device=device),
            torch.zeros(len(layers), slots, heads.num_value_heads, heads.key_dim, heads.value_dim, device=device),
            num_slots,
        )

    @property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(convolution's states, delta rule's states) of each layer, by slot."""
        return tuple(zip(self.conv.unbind(), self.delta.unbind(), strict=True))

    def place(self, plan: StepPlan) -> None:
        """Make the copies that come first in a step. They allocate no memory, so they cannot fail."""
        for source, target in plan.state_moves:
            self._copy(source, target)
        for row in plan.rows:
            if row.state is not None and row.state.restore is not None:
                self._copy(self.num_slots + row.state.restore, row.state.slot)

    def save(self, plan: StepPlan) -> None:
        """Save the states that the step's rows ask to save, after the step."""
        for row in plan.rows:
            if row.state is not None and row.state.save is not None:
                self._copy(row.state.slot, self.num_slots + row.state.save)

    def _copy(self, source: int, target: int) -> None:
        for states in (self.conv, self.delta):
            states[:, target].copy_(states[:, source])
