"""Owns a decoder's narrow weights on a device: packed for its kernels, counted, and multiplied once at the start.
Never chooses which weights are narrow: they were loaded so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.models.narrow import layout_name, num_inputs
from engine.models.parameters import DecoderWeights, SharedExpertWeights
from kernels.eager.ops import NarrowOps
from kernels.forward import Linear

_Change = Callable[[Linear], Linear]


@dataclass(frozen=True, slots=True)
class NarrowProducts:
    """The matrices of a decoder as they were loaded, and one packed matrix for each kind of product."""

    counts: Counter[str] = field(default_factory=Counter)
    """By the type of the weights: how many matrices have it. All of a layer's experts are one."""
    kinds: dict[Any, tuple[Linear, int]] = field(default_factory=dict)
    """By what kernels are compiled for: a packed matrix, and its inputs. Experts are not among them."""

    @property
    def summary(self) -> str:
        return "matrices: " + ", ".join(f"{count} in {name}" for name, count in self.counts.items())

    @torch.inference_mode()
    def warm_up(self, ops: NarrowOps, dtype: torch.dtype, device: torch.device) -> None:
        """Multiply by each kind of matrix once in each launch: kernels are compiled, and choose their configurations,
        when they are first launched, and every stream would wait for that. dtype: that of activations."""
        for linear, inputs in self.kinds.values():
            for rows in ops.launch_rows:
                ops.linear(torch.zeros(rows, inputs, dtype=dtype, device=device), linear)


def pack_narrow(weights: DecoderWeights, ops: NarrowOps | None) -> tuple[DecoderWeights, NarrowProducts]:
    """Pack the matrices that have scales, each in its own memory where that is possible. ops: None only counts."""
    found = NarrowProducts()

    def own(linear: Linear) -> Linear:
        found.counts[layout_name(linear.weight.dtype)] += 1
        if linear.scales is None:
            return linear
        assert ops is not None, "only what these operators multiply by is loaded so"
        optional = (linear.zeros, linear.bias, linear.order, linear.input_scale)
        kind = (linear.weight.shape, linear.weight.dtype, linear.group, *(part is None for part in optional))
        of_experts, inputs, packed = linear.weight.dim() == 3, num_inputs(linear.weight), ops.pack(linear)
        if not of_experts:
            found.kinds.setdefault(kind, (packed, inputs))
        return packed

    return _each_matrix(weights, own), found


def _each_matrix(weights: DecoderWeights, change: _Change) -> DecoderWeights:
    """Return the weights with each matrix changed, but for an embedding that is the LM head, too."""
    tied = weights.lm_head.weight is weights.embedding
    return replace(
        weights,
        layers=tuple(
            replace(
                layer,
                qkv=change(layer.qkv),
                output=change(layer.output),
                gate_up=change(layer.gate_up),
                down=change(layer.down),
                shared=None if layer.shared is None else _each_of_shared(layer.shared, change),
            )
            for layer in weights.layers
        ),
        lm_head=weights.lm_head if tied else change(weights.lm_head),
    )


def _each_of_shared(shared: SharedExpertWeights, change: _Change) -> SharedExpertWeights:
    return replace(shared, gate_up=change(shared.gate_up), down=change(shared.down))
