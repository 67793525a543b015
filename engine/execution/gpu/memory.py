"""Owns the arithmetic of a device's memory: how much is left for KV blocks after everything else.
Never asks a device: it is given what was measured, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that were measured on one device before KV blocks were allocated."""

    total: int
    others: int
    """In use before the engine started: by other processes and the driver."""
    weights: int
    activations: int
    """Maximum that the largest steps and the work of captures took beyond the weights."""
    states: int = 0
    """Recurrent states: all slots and snapshots."""
    adapters: int = 0
    """LoRA adapters: all slots, with an adapter or without."""
    moving: int = 0
    """Buffers for KV on its way to and from lower tiers."""
    graphs: int = 0
    """Memory that captured steps keep."""

    @property
    def taken(self) -> int:
        """All that is taken before the first KV block."""
        return self.others + self.weights + self.activations + self.states + self.adapters + self.moving + self.graphs

    def text(self) -> str:
        """Every part in GiB."""
        parts = {
            "others": self.others,
            "weights": self.weights,
            "activations of the largest step": self.activations,
            **({"recurrent states": self.states} if self.states else {}),
            **({"adapters": self.adapters} if self.adapters else {}),
            **({"buffers for kv_tiers": self.moving} if self.moving else {}),
            "graphs": self.graphs,
        }
        held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"{held} of {self.total / GIB:.2f} GiB"


def check_states_fit(use: MemoryUse) -> None:
    """Raise ConfigError if the device has no memory for the recurrent states of all seats and snapshots."""
    left = use.total - use.taken + use.states
    if use.states > left:
        raise ConfigError(
            f"recurrent states of max_num_seqs requests and state_snapshots snapshots take {use.states / GIB:.2f} GiB, "
            f"but {left / GIB:.2f} GiB are left: {use.text()}."
        )


def check_adapters_fit(use: MemoryUse, num_slots: int, max_rank: int) -> None:
    """Raise ConfigError if the device has no memory for the slots of LoRA adapters."""
    left = use.total - use.taken + use.adapters
    if use.adapters > left:
        raise ConfigError(
            f"max_loras {num_slots} adapters of max_lora_rank {max_rank} take {use.adapters / GIB:.2f} GiB, but "
            f"{left / GIB:.2f} GiB are left: {use.text()}. Lower max_loras or max_lora_rank."
        )


def kv_blocks_that_fit(use: MemoryUse, utilization: float, block_bytes: int, *, spare_blocks: int = 0) -> int:
    """The number of KV blocks that fit below `utilization` of the device's memory, without `spare_blocks`, which the
    scheduler never sees.

        0 ... others ... weights ... activations ... states, adapters, buffers, graphs ... KV blocks ... limit ... total

    The limit is utilization * total.

    Raises:
        ConfigError: not one fits. The message says what takes the memory.
    """
    left = int(use.total * utilization) - use.taken
    blocks = left // block_bytes - spare_blocks
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g} leaves {left / GIB:.2f} GiB for KV blocks of {block_bytes} bytes, "
            f"of which at least {spare_blocks + 1} are needed: {use.text()}."
        )
    return blocks


PART_TO_TIME_WITH = 4
"""One in so many of the bytes that KV blocks would get: the largest step and captures are measured beside them."""


def blocks_to_time_with(use: MemoryUse, utilization: float, block_bytes: int, *, least: int, most: int) -> int:
    """KV blocks of the steps in which kernels are timed, `most` if there is room for them."""
    left = int(use.total * utilization) - use.taken
    return max(least, min(most, left // PART_TO_TIME_WITH // block_bytes))


def check_blocks_fit(
    use: MemoryUse, block_bytes: int, num_blocks: int, *, spare_blocks: int = 0, setting: str | None = None
) -> None:
    """Raise ConfigError if the device has no memory for the number of blocks that the config asks for. setting: the
    setting that asks for them, with its value; None means num_kv_blocks."""
    need = (num_blocks + spare_blocks) * block_bytes
    left = use.total - use.taken
    if need > left:
        asked = setting or f"num_kv_blocks {num_blocks}"
        raise ConfigError(f"{asked} takes {need / GIB:.2f} GiB, but {left / GIB:.2f} GiB are left: {use.text()}.")
