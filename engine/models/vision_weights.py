"""Owns the tensors of an image encoder, and their names in checkpoints.
Never reads a file: `engine.models.weights` fills what this allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.vision_config import VisionConfig
from kernels.cpu.large_pages import empty_on
from kernels.forward import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayer:
    attention_norm: Tensor  # [hidden]
    qkv: Linear  # [3 * hidden, hidden]
    output: Linear  # [hidden, hidden]
    mlp_norm: Tensor  # [hidden]
    gate: Linear  # [intermediate, hidden]
    up: Linear  # [intermediate, hidden]
    down: Linear  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWeights:
    """The encoder's weights. The merger turns merge_size x merge_size neighbouring patches into one decoder token."""

    patches: Tensor  # [hidden, channels, temporal_patch_size, patch_size, patch_size]
    layers: tuple[VisionLayer, ...]
    merger_norm: Tensor  # [hidden]
    merger_in: Linear  # [merged, merged], merged = hidden * merge_size ** 2
    merger_out: Linear  # [output, merged]


def allocate_vision(config: VisionConfig, dtype: torch.dtype, device: torch.device | None = None) -> VisionWeights:
    """Allocate tensors of the right shapes with undefined contents. device: None means the CPU."""
    hidden, merged = config.hidden_size, config.hidden_size * config.merge_size**2
    empty = empty_on(device)

    def tensor(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(empty(outputs, inputs, dtype=dtype), tensor(outputs))

    def layer() -> VisionLayer:
        return VisionLayer(
            attention_norm=tensor(hidden),
            qkv=linear(3 * hidden, hidden),
            output=linear(hidden, hidden),
            mlp_norm=tensor(hidden),
            gate=linear(config.intermediate_size, hidden),
            up=linear(config.intermediate_size, hidden),
            down=linear(hidden, config.intermediate_size),
        )

    return VisionWeights(
        patches=tensor(hidden, config.channels, config.temporal_patch_size, config.patch_size, config.patch_size),
        layers=tuple(layer() for _ in range(config.depth)),
        merger_norm=tensor(hidden),
        merger_in=linear(merged, merged),
        merger_out=linear(config.output_size, merged),
    )


def vision_table(weights: VisionWeights) -> dict[str, Tensor]:
    """Map each name of a checkpoint's tensor to the tensor that it fills."""
    table = {
        "visual.patch_embed.proj.weight": weights.patches,
        "visual.merger.ln_q.weight": weights.merger_norm,
    }
    linears = {"visual.merger.mlp.0": weights.merger_in, "visual.merger.mlp.2": weights.merger_out}
    for number, layer in enumerate(weights.layers):
        name = f"visual.blocks.{number}"
        table |= {f"{name}.norm1.weight": layer.attention_norm, f"{name}.norm2.weight": layer.mlp_norm}
        linears |= {f"{name}.attn.qkv": layer.qkv, f"{name}.attn.proj": layer.output}
        linears |= {f"{name}.mlp.{part}_proj": getattr(layer, part) for part in ("gate", "up", "down")}
    for name, linear in linears.items():
        table |= {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    return table
