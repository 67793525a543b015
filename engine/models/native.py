"""Owns a model as a program of the native library: operations are recorded once, and each step is a single call.
Never runs Python between operations, and never keeps anything of a step except K, V and recurrent states."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from engine.batch.inputs import check_plan, fed_tokens, sampled_tokens
from engine.batch.logprobs import SCORED_POSITIONS
from engine.host.allocator import give_back_freed_memory
from engine.models.computed import Computed
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.native_adapters import NativeAdapters, adapted
from engine.models.native_rewind import NativeRewind, drafted_rows
from engine.models.parameters import DecoderWeights, LayerWeights, SharedExpertWeights
from engine.models.recurrent_state import RecurrentState
from engine.models.stored_matrix import StoredExperts, StoredMatrix
from engine.step import RowSampling, ScheduledRequest, StepPlan
from kernels.collectives.group import Exchanging, Group
from kernels.collectives.reduction import exchange_of, reduction_of
from kernels.cpu.large_pages import LargePages
from kernels.cpu.native.linear_attention import LinearAttentionProgram, Rewind
from kernels.cpu.native.low_rank import PackedAdapter
from kernels.cpu.native.program import Buffer, Program, StepRows, Team, pack, pack_grouped, pack_grouped_experts
from kernels.cpu.native.sampling import DrawnRow, draw_rows
from kernels.cpu.native.spans import Spans
from kernels.forward import Linear


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A model's programs for steps of up to `num_tokens` tokens and `num_sampled` sampled positions."""

    num_tokens: int
    num_sampled: int
    rewind: Rewind | None
    """For the tokens that rows with drafts may have; None: the model has no states, or no step had any drafts."""
    program: Program
    hidden: Buffer
    logits: Buffer
    best: tuple[Buffer, Buffer]
    head: Program
    """Computes the logits of any of the step's tokens."""
    scored: Buffer
    last_found: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """What `found` returned last, by its arguments."""

    def found(self, num_tokens: int, places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views of what a step left: hidden states, logits, most likely tokens and their logits.

        To make them takes 0.2 ms of a step of decodes, whose weights have just filled the caches, and sizes seldom
        change.
        """
        if (views := self.last_found.get((num_tokens, places))) is None:
            tokens, best = (buffer.tensor[:places, 0] for buffer in self.best)
            views = self.hidden.tensor[:num_tokens], self.logits.tensor[:places], tokens, best
            self.last_found.clear()
            self.last_found[num_tokens, places] = views
        return views


class NativeModel:
    """An engine.models.computed.Model that records `decoder`. It takes over the decoder's weights and repacks them.

    K and V are in `cache` in the library's own order; see cache.h.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        state: RecurrentState | None = None,
        *,
        block_size: int,
        num_threads: int,
        num_tokens: int,
        num_sampled: int,
        num_drafted: int = 0,
        quantize: bool = False,
        rounded: bool = False,
        max_lora_rank: int = 0,
        group: Group | None = None,
        expert_ranks: Exchanging | None = None,
    ) -> None:
        """num_tokens, num_sampled: the step size to reserve memory for; a larger step reserves more, for good.
        num_drafted: the tokens of rows with drafts likewise, if the model has states.
        quantize: use 8-bit matrices; rounded: round the activations that matrices of 4 to 8 bits are multiplied by; see
        kernels.cpu.native.program.pack. max_lora_rank: 0: rows have no LoRA adapters.
        group: the ranks that `decoder` is a shard for; a step then may raise RankLostError. None: it is whole.
        expert_ranks: those that have the experts between them, of which `decoder` has this rank's: then it is a
        engine.models.expert_ranks.DividedModel. None: it has all."""
        decoder.weights = _packed(decoder.weights, quantize=quantize, rounded=rounded, num_threads=num_threads)
        self.adapters: NativeAdapters | None = None
        if max_lora_rank:
            decoder.weights, matrices = adapted(decoder.weights, decoder.config, max_lora_rank)
            self.adapters = NativeAdapters(decoder.config, decoder.dtype, max_lora_rank, matrices)
        self.decoder = decoder
        self.cache = cache
        self._block_size = block_size
        self.team = Team(num_threads)
        self._reduction = None if group is None else reduction_of(group)
        self._exchange = None if expert_ranks is None else exchange_of(expert_ranks)
        self._has_run = False  # the pass that has begun; see DividedModel
        self.state = state
        self.busy_s = 0.0
        """Seconds that steps have spent in the library so far; the rest of the engine's time is Python's."""
        self._recorded = self._record(num_tokens, num_sampled, 0 if state is None else num_drafted)

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        check_plan(plan, self._block_size, 0 if self.state is None else self.state.num_slots)
        rows = plan.rows
        counts = [len(row.token_ids) for row in rows]
        adapters = self._adapters_of(rows)
        sampled = sampled_tokens(rows, counts)
        drafted = drafted_rows(rows) if self.state is not None else range(0)
        recorded = self._with_room(sum(counts), len(sampled), sum(counts[row] for row in drafted))
        needed = (row.block_ids[: -(-row.end // self._block_size)] for row in rows)
        step = StepRows(
            (fed_tokens(row, newest) for row in rows),
            [row.start for row in rows],
            counts,
            list(needed),
            sampled,
            [row.state.slot for row in rows if row.state is not None],
            (drafted.start, len(drafted)),
            adapters,
            self._spans(plan),
        )
        self._run(recorded.program, step)
        self._has_run = True
        rewind = None
        if drafted:
            assert recorded.rewind is not None
            rewind = NativeRewind(partial(self._run, recorded.rewind.program), rows, drafted, self._block_size)
        hidden, logits, tokens, best = recorded.found(step.num_tokens, len(sampled))
        return Computed(hidden, logits, self._logits_at, (tokens, best), self._draw, rewind)

    def begin_pass(self) -> None:
        self._has_run = False

    def finish_pass(self) -> None:
        if not self._has_run:  # a record is run as a whole or not at all
            self._run(self._recorded.program, StepRows((), (), (), ()))

    def _run(self, program: Program, step: StepRows) -> None:
        begun = time.perf_counter()
        program.run(step)
        self.busy_s += time.perf_counter() - begun

    def _adapters_of(self, rows: Sequence[ScheduledRequest]) -> list[PackedAdapter | None]:
        if self.adapters is not None:
            return self.adapters.of_rows(rows)
        if lost := next((row.adapter for row in rows if row.adapter), None):
            raise ValueError(f"A row needs the adapter {lost}, and this model has none.")
        return []

    def _spans(self, plan: StepPlan) -> Spans | None:
        """Return the plan's inputs besides text. None: the model takes text alone."""
        return None

    def _logits_at(self, index: Tensor) -> Tensor:
        """Return the logits of the step's tokens `index`. # [len(index), vocab]"""
        found, recorded = [], self._recorded
        for first in range(0, len(index), SCORED_POSITIONS):
            piece = index[first : first + SCORED_POSITIONS].tolist()
            recorded.head.run(StepRows((), (), (), (), piece))
            scored = recorded.scored.tensor[: len(piece)]
            found.append(scored if len(piece) == len(index) else scored.clone())
        return torch.cat(found) if len(found) != 1 else found[0]

    def _draw(
        self, logits: Tensor, numbers: Sequence[int], how: Sequence[RowSampling], positions: Sequence[int]
    ) -> list[int]:
        rows = [
            DrawnRow(number, row.seed, position, row.top_k, row.temperature, row.top_p, row.min_p)
            for number, row, position in zip(numbers, how, positions, strict=True)
        ]
        return draw_rows(self.team, logits, rows)

    def _with_room(self, num_tokens: int, num_sampled: int, num_drafted: int = 0) -> _Recorded:
        """Return the programs, recorded again if the step is larger than any before. If memory runs out, the old ones
        stay. num_drafted: tokens of rows with drafts, if the model has states."""
        now = self._recorded
        room = 0 if now.rewind is None else now.rewind.capacity
        if num_tokens > now.num_tokens or num_sampled > now.num_sampled or num_drafted > room:
            self._recorded = self._record(
                max(num_tokens, now.num_tokens), max(num_sampled, now.num_sampled), max(num_drafted, room)
            )
        return self._recorded

    def _record(self, num_tokens: int, num_sampled: int, num_drafted: int) -> _Recorded:
        program, head = self._program(num_tokens), self._program(num_tokens)
        rewind = Rewind(self._program(num_drafted), num_drafted, self.decoder.dtype) if num_drafted else None
        program.rewind = rewind
        hidden: Buffer = self.decoder.forward(program, self.cache, self.state)
        lm_head = self.decoder.weights.lm_head
        logits = program.logits(hidden, lm_head, num_sampled)
        best = program.argmax(logits)
        scored = head.logits(hidden, lm_head, SCORED_POSITIONS)
        return _Recorded(num_tokens, num_sampled, rewind, program, hidden, logits, best, head, scored)

    def _program(self, num_tokens: int) -> LinearAttentionProgram:
        return LinearAttentionProgram(
            self.team,
            block_size=self._block_size,
            capacity=num_tokens,
            dtype=self.decoder.dtype,
            reduction=self._reduction,
            exchange=self._exchange,
        )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads in the calling thread, and in each thread that first computes in here.

    With OpenMP, torch's number is per thread, and a thread takes what was set last when it first computes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _packed(weights: DecoderWeights, *, quantize: bool, rounded: bool, num_threads: int = 1) -> DecoderWeights:
    """Pack weights in place, a layer in each thread. A tied LM head is copied instead, because the embedding must stay
    readable by row; in blocks, the embedding is read from the LM head's panels, unless these are a rank's alone."""
    tied = weights.head_in_embedding
    dtype: torch.dtype = weights.embedding.dtype
    empty = LargePages().empty

    def packed(linear: Linear, *, gated: bool = False, consume: bool = True, quantize: bool = quantize) -> Linear:
        if isinstance(linear.weight, StoredMatrix):
            parts = linear.weight.take_parts()
            return pack_grouped(parts, linear.bias, gated=gated, rounded=rounded, num_threads=num_threads, empty=empty)
        if isinstance(linear.weight, StoredExperts):
            experts = linear.weight.take()
            return pack_grouped_experts(experts, gated=gated, rounded=rounded, num_threads=num_threads, empty=empty)
        return pack(linear, gated=gated, consume=consume, quantize=quantize, dtype=dtype, rounded=rounded, empty=empty)

    def shared(expert: SharedExpertWeights) -> SharedExpertWeights:
        return SharedExpertWeights(
            gate_up=packed(expert.gate_up, gated=True),
            down=packed(expert.down),
            gate=packed(expert.gate, quantize=False),  # one output: rounding it would save nothing
        )

    def packed_layer(layer: LayerWeights) -> LayerWeights:
        made = replace(
            layer,
            qkv=packed(layer.qkv),
            output=packed(layer.output),
            gate_up=packed(layer.gate_up, gated=True),
            down=packed(layer.down),
            shared=None if layer.shared is None else shared(layer.shared),
        )
        if any(
            isinstance(each.weight, (StoredMatrix, StoredExperts)) for each in (layer.qkv, layer.gate_up, layer.down)
        ):
            give_back_freed_memory()  # or all layers would be in memory twice
        return made

    # The library and torch work without the interpreter's lock.
    with torch_threads(1), ThreadPoolExecutor(num_threads) as pool:  # each would start as many as all have
        head_job = pool.submit(packed, weights.lm_head, consume=not tied)  # the largest matrix first
        layers = tuple(pool.map(packed_layer, weights.layers))
        head = head_job.result()
    embedding = weights.embedding
    if isinstance(embedding, StoredMatrix):
        embedding = head.weight if tied else pack_grouped(embedding.take_parts(), empty=empty).weight
    return replace(weights, embedding=embedding, layers=layers, lm_head=head)
