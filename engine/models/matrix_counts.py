"""Owns the count of a loaded decoder's matrices by what they are held in, for the log.
Never packs or converts one."""

from __future__ import annotations

from collections import Counter

from engine.models.narrow import layout_name
from engine.models.parameters import DecoderWeights
from engine.models.stored_matrix import StoredMatrix
from kernels.forward import Linear


def count_matrices(weights: DecoderWeights) -> str:
    """Return how many matrices have which type. All of a layer's experts are one. The embedding is left out, unless it
    is the LM head."""
    matrices = [weights.lm_head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
        matrices += [] if layer.shared is None else [layer.shared.gate_up, layer.shared.down]
    counts = Counter(map(_held_in, matrices))
    return "matrices: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _held_in(linear: Linear) -> str:
    return "as stored" if isinstance(linear.weight, StoredMatrix) else f"in {layout_name(linear.weight.dtype)}"
