"""Owns the LoRA adapters of a model on the native library: which are in memory, and the matrices that they add to.
Never adds anything itself: the library's products do, for rows whose step names an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.models.adapter_files import Place, read_factors, stacked_b, stacked_places
from engine.models.description import ModelConfig
from engine.models.parameters import DecoderWeights, LayerWeights
from engine.step import ScheduledRequest
from kernels.cpu.native.grouped import PANEL
from kernels.cpu.native.low_rank import AdaptedMatrix, PackedAdapter, whole_pairs
from kernels.cpu.native.program import outputs_by_lane
from kernels.forward import Linear

Matrices = Mapping[tuple[int, str], AdaptedMatrix]
"""By (layer, stack)."""


class NativeAdapters:
    """An engine.step.AdapterHost. An adapter has the memory of its own rank and of the matrices that it adapts."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, max_rank: int, matrices: Matrices) -> None:
        self._model, self._dtype, self._max_rank = model, dtype, max_rank
        self._matrices = matrices
        self._parts = stacked_places(model)
        self._kept: dict[str, PackedAdapter] = {}

    def read(self, path: str) -> tuple[str, PackedAdapter]:
        digest, factors = read_factors(Path(path), self._model, self._dtype, self._max_rank)
        packed = PackedAdapter(len(self._matrices), self._dtype)
        for key, matrix in self._matrices.items():
            own = [factors.get(place) for place in self._parts[key]]
            ranks = [len(each.a) for each in own if each is not None]
            if ranks:
                b = stacked_b(self._model, self._parts[key], factors, max(ranks))
                packed.put(matrix, [None if each is None else each.a for each in own], b)
        return digest, packed

    def keep(self, digest: str, weights: PackedAdapter) -> None:
        self._kept[digest] = weights

    def drop(self, digest: str) -> None:
        del self._kept[digest]

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters in memory."""
        return sum(adapter.num_bytes for adapter in self._kept.values())

    def of_rows(self, rows: Sequence[ScheduledRequest]) -> list[PackedAdapter | None]:
        """Return each row's adapter; [] if no row has one. The caller holds them for as long as a step reads them.

        Raises:
            ValueError: a row's adapter was not kept.
        """
        if not any(row.adapter for row in rows):
            return []
        found = [self._kept.get(row.adapter) for row in rows]
        for row, adapter in zip(rows, found, strict=True):
            if row.adapter and adapter is None:
                raise ValueError(f"A row needs the adapter {row.adapter}, which was not kept.")
        return found


def adapted(weights: DecoderWeights, model: ModelConfig, max_rank: int) -> tuple[DecoderWeights, Matrices]:
    """Return packed weights that say how adapters of up to `max_rank` add to them, and the matrices that they adapt."""
    matrices: dict[tuple[int, str], AdaptedMatrix] = {}
    layers = list(weights.layers)
    for number, ((layer, stack), parts) in enumerate(stacked_places(model).items()):
        linear: Linear = getattr(layers[layer], stack)
        lanes = outputs_by_lane(linear.weight, gated=stack == "gate_up")
        matrix = AdaptedMatrix(number, max_rank, tuple(part.first for part in parts), lanes)
        matrices[layer, stack] = matrix
        layers[layer] = _with_linear(
            layers[layer], stack, replace(linear, weight=replace(linear.weight, adapted=matrix))
        )
    return replace(weights, layers=tuple(layers)), matrices


def _with_linear(layer: LayerWeights, stack: str, linear: Linear) -> LayerWeights:
    return replace(layer, **{stack: linear})  # type: ignore[arg-type]


def packed_adapter_bytes(model: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of an adapter of this rank that adapts every module it may; each part has whole panels."""
    parts = [place for stack in stacked_places(model).values() for place in stack]
    return whole_pairs(rank) * dtype.itemsize * sum(place.inputs + _in_panels(place) for place in parts)


def _in_panels(place: Place) -> int:
    return -(-place.outputs // PANEL) * PANEL
