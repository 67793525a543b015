"""Owns a model in which each row may have its own LoRA adapter (arXiv 2106.09685).
Never changes a row without an adapter: its results are bit for bit those of the same step without adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.adapter_files import STACKS, Delta, Deltas, read_adapter
from engine.models.decoder import Decoder
from engine.models.eager import EagerModel
from engine.models.kv_cache import KVCache
from engine.step import AdapterHost, ScheduledRequest
from kernels.collectives.group import Exchanging, Group
from kernels.cpu.low_rank import Tokens, add_low_rank
from kernels.eager.forward import EagerPass
from kernels.eager.ops import Ops
from kernels.forward import Linear


class AdaptedModel(EagerModel):
    """An EagerModel, and the engine.step.AdapterHost of its adapters."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        cache: KVCache,
        block_size: int,
        *,
        max_rank: int,
        group: Group | None = None,
        expert_ranks: Exchanging | None = None,
    ) -> None:
        """group, expert_ranks: see EagerModel."""
        super().__init__(decoder, ops, cache, block_size, group=group, expert_ranks=expert_ranks)
        self._max_rank = max_rank
        self._adapters: dict[str, Mapping[int, Delta]] = {}  # digest -> (id of a Linear -> its delta)
        self._linears = {
            (number, stack): getattr(layer, stack)
            for number, layer in enumerate(decoder.weights.layers)
            for stack in STACKS
        }

    @property
    def adapters(self) -> AdapterHost:
        return self

    def read(self, path: str) -> tuple[str, Deltas]:
        return read_adapter(Path(path), self.decoder.config, self.decoder.dtype, self._max_rank)

    def keep(self, digest: str, weights: Deltas) -> None:
        self._adapters[digest] = {id(self._linears[place]): delta for place, delta in weights.items()}

    def drop(self, digest: str) -> None:
        del self._adapters[digest]

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters in memory."""
        kept = (delta for deltas in self._adapters.values() for delta in deltas.values())
        return sum(delta.a.nbytes + delta.b.nbytes for delta in kept)

    def _pass(self, rows: Sequence[ScheduledRequest], **step: Any) -> EagerPass:
        groups = tokens_by_adapter(rows)
        if lost := next((digest for digest in groups if digest not in self._adapters), None):
            raise ValueError(f"A row needs the adapter {lost}, which was not kept.")
        if not groups:
            return super()._pass(rows, **step)
        adapters = StepDeltas([(self._adapters[digest], tokens) for digest, tokens in groups.items()])
        return super()._pass(rows, adapters=adapters, **step)


class StepDeltas:
    """The kernels.eager.forward.Adapters of a step, computed one after another; each token has at most one."""

    def __init__(self, adapters: Sequence[tuple[Mapping[int, Delta], Tokens]]) -> None:
        self._adapters = adapters

    def add(self, y: Tensor, x: Tensor, linear: Linear) -> None:
        for deltas, tokens in self._adapters:
            if (delta := deltas.get(id(linear))) is not None:
                add_low_rank(y, x, delta.a, delta.b, tokens)


def tokens_by_adapter(rows: Sequence[ScheduledRequest]) -> dict[str, Tokens]:
    """Map each adapter's digest to the indices of its rows' tokens within the step."""
    begins = accumulate((len(row.token_ids) for row in rows[:-1]), initial=0)
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row, begin in zip(rows, begins, strict=True):
        if row.adapter:
            spans[row.adapter].append((begin, begin + len(row.token_ids)))
    return {digest: _joined(own_spans) for digest, own_spans in spans.items()}


def _joined(spans: Sequence[tuple[int, int]]) -> Tokens:
    """Join spans into one index. Adjacent spans become a slice, which needs no copies."""
    first, last = spans[0][0], spans[-1][1]
    if last - first == sum(end - begin for begin, end in spans):
        return slice(first, last)
    return torch.cat([torch.arange(begin, end) for begin, end in spans])
