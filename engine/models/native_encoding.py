"""Owns a decoder with an encoder on the native library: a step's single call has its inputs' embeddings and positions.
Never encodes in the library: the encoder runs before it, on torch's operators, with as many threads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from engine.models.computed import Computed
from engine.models.contents import Contents, Filled
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.native import NativeModel, torch_threads
from engine.step import StepPlan
from kernels.cpu.native.multimodal import MultimodalProgram
from kernels.cpu.native.spans import Span, Spans


class NativeEncodingModel(NativeModel):
    """A NativeModel whose prompts may show images."""

    def __init__(self, decoder: Decoder, contents: Contents, cache: KVCache, *, num_threads: int, **how: Any) -> None:
        """how: see NativeModel."""
        self.contents = contents
        self._axis_of_pair = contents.axis_of_pair()
        self._num_threads = num_threads
        super().__init__(decoder, cache, num_threads=num_threads, **how)

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        with torch_threads(self._num_threads) if plan.encodes else nullcontext():  # the library's threads sleep
            self.contents.update(plan)
        return super().forward(plan, newest)

    def _spans(self, plan: StepPlan) -> Spans:
        shifts = [row.inputs.shift if row.inputs else 0 for row in plan.rows]
        return Spans(shifts, [_span(one) for one in self.contents.filled(plan)])

    def _program(self, num_tokens: int) -> MultimodalProgram:
        return MultimodalProgram(
            self.team,
            self._axis_of_pair,
            block_size=self._block_size,
            capacity=num_tokens,
            dtype=self.decoder.dtype,
            reduction=self._reduction,
        )


def _span(one: Filled) -> Span:
    placed = one.placed
    return Span(one.begin, one.end, one.first, placed.grid, placed.position, placed.shift_after, one.embeddings)
