"""Owns the count of a loaded decoder's matrices by what they are held in, for the log.
Never packs or converts one."""

from __future__ import annotations

from collections import Counter

import torch

from engine.models.narrow import layout_name
from engine.models.parameters import DecoderWeights
from engine.models.stored_matrix import StoredExperts, StoredMatrix
from kernels.forward import Linear


def count_matrices(weights: DecoderWeights, *, rounds: bool = False) -> str:
    """Return how many matrices have which type. All of a layer's experts are one. The embedding is left out, unless it
    is the LM head. rounds: whether those that are not stored in fewer bits are rounded to 8 when they are packed."""
    counts = Counter(_held_in(linear, rounds) for linear in matrices(weights))
    return "matrices: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())


def matrices(weights: DecoderWeights) -> list[Linear]:
    """Return the matrices that products read. All of a layer's experts are one."""
    found = [weights.lm_head]
    for layer in weights.layers:
        found += [layer.qkv, layer.output, layer.gate_up, layer.down]
        found += [] if layer.shared is None else [layer.shared.gate_up, layer.shared.down]
    return found


def _held_in(linear: Linear, rounds: bool) -> str:
    if isinstance(linear.weight, StoredMatrix | StoredExperts):
        return "as stored"
    return f"in {layout_name(torch.int8 if rounds else linear.weight.dtype)}"
