"""Owns the steps of a device that works asynchronously: launch queues a step, collect waits for it and returns its
output.
Never reads a value back in `launch`, except for a row whose grammar has to see a token that was not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from engine.batch.grammar import Grammars
from engine.batch.logit_controls import Within
from engine.batch.logprobs import (
    SCORED_POSITIONS,
    find_logprobs,
    find_ranks,
    read_logprobs,
    scores_by_row,
    wanted_scores,
)
from engine.batch.row_order import (
    SamplePosition,
    in_kernel_order,
    in_plan_order,
    make_output,
    pooled_by_row,
    sampled_positions,
    sum_pooled,
)
from engine.execution.answers import Answers
from engine.execution.device import Device, Download, StateLostError, TorchThreads, advancing, device_faults
from engine.execution.gpu.model import DeviceModel
from engine.execution.gpu.ranks import Pending
from engine.execution.gpu.sampler import NO_TOKEN, choose_on_device
from engine.execution.gpu.token_counts import TokenCounts
from engine.execution.ranks import Ranks
from engine.host.shares import Claim
from engine.kv_tiers import KvMover
from engine.models.computed import Computed
from engine.protocol import TokenLogprobs
from engine.step import (
    PENDING_TOKEN,
    Capabilities,
    ExecutorOutOfMemoryError,
    GraphUse,
    RowFailure,
    RowKind,
    ScheduledRequest,
    StepOutput,
    StepPlan,
)

NO_FAILURES: Mapping[int, RowFailure] = MappingProxyType({})
_Found = tuple[Tensor, Tensor, Tensor]
"""The result of engine.batch.logprobs.find_logprobs."""
_Score = tuple[Tensor, Tensor, Tensor, Tensor]
"""The same, with the result of engine.batch.logprobs.find_ranks."""


@dataclass(slots=True)
class _Queued:
    """A step's results on the device. They come back as one download, in this order."""

    tokens: Tensor | None = None
    """[places] int64"""
    logprobs: list[_Found] = field(default_factory=list)
    """For the places that ask for them, SCORED_POSITIONS at a time."""
    scores: list[_Score] = field(default_factory=list)
    """For prompt tokens, likewise."""
    pooled: Tensor | None = None
    """[pooled rows, hidden]"""

    def tensors(self) -> list[Tensor]:
        alone = [tensor for tensor in (self.tokens, self.pooled) if tensor is not None]
        return [*alone, *(tensor for group in (*self.logprobs, *self.scores) for tensor in group)]


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    """In kernel order."""
    order: list[int] | None
    places: list[SamplePosition]
    without_mask: Mapping[int, RowFailure]
    limited: bool
    """Whether grammars limit any row."""
    graph: GraphUse | None
    queued: _Queued
    download: Download
    forgotten: set[str] = field(default_factory=set)
    output: StepOutput | None = None


class DeviceExecutor:
    """An engine.execution.executor.ModelExecutor that can launch a step while the one before is still running."""

    def __init__(
        self,
        model: DeviceModel,
        device: Device,
        *,
        num_threads: int,
        grammars: Grammars | None = None,
        kv_mover: KvMover | None = None,
        ranks: Ranks | None = None,
        claim: Claim | None = None,
    ) -> None:
        """num_threads: for torch's operators on the host. grammars: see Answers. kv_mover: moves the model's KV; it
        ends with the executor. ranks: the others that compute the model, which end with it, too. claim: on the host's
        memory; given up at shutdown."""
        self.model = model
        self._device = device
        self._answers = Answers(grammars)
        self._kv_mover, self._ranks, self._claim = kv_mover, ranks, claim
        self._threads = TorchThreads(num_threads)
        self._launched: deque[_Launched] = deque()
        self._counts = TokenCounts(device, model.decoder.config.vocab_size)
        self._flying: dict[str, tuple[Tensor, int | None]] = {}
        """See Flying in engine.execution.gpu.token_counts."""

    @property
    def capabilities(self) -> Capabilities:
        has_state = self.model.state is not None
        return Capabilities(
            mixed_rows=True,
            overlap=True,
            drafts=not has_state,
            recurrent_state=has_state,
            grammars=self._answers.grammars,
            adapters=self.model.adapters,
            sizes=self.model.sizes,
            kv_mover=self._kv_mover,
            ranks=self._ranks,
        )

    # --- launch -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue the step. A failure is an ordinary exception: rows of other plans are not affected.

        Raises:
            ValueError: the plan breaks the seam's contract. Fatal for a model with recurrent state on several ranks.
            ExecutorOutOfMemoryError: there is no memory for the activations of so many tokens. The step left no trace.
            StateLostError: the same, of a model with recurrent state.
            ExecutorFatalError: the device can do nothing more, or the step failed on one of several ranks.
        """
        try:
            with device_faults(), self.model.ranks.together(advances=self.model.state is not None):
                with advancing(self.model.state, plan):
                    launched = self._start(plan)
                self._launched.append(launched)
        except (ExecutorOutOfMemoryError, StateLostError):
            self._device.release_unused()  # a smaller step may fit into memory that the failed one left
            raise

    def _start(self, planned: StepPlan) -> _Launched:
        plan, order = in_kernel_order(planned)
        if self._must_know(plan):
            self._read_all()
        places = sampled_positions(plan.rows)
        self._threads.use()
        if (decoded := self.model.decode(plan, self._answers.newest, self._pending(plan))) is not None:
            tokens, use = decoded
            return self._launch(plan, order, places, _Queued(tokens=tokens), use)
        with self._answers.masks(plan, places) as masks:
            computed, graph = self.model.start(plan, self._answers.newest, self._pending(plan))
        within, without_mask = masks.result()
        queued = self._queue(plan, places, computed, within)
        return self._launch(plan, order, places, queued, graph, without_mask, limited=within is not None)

    def _launch(
        self,
        plan: StepPlan,
        order: list[int] | None,
        places: list[SamplePosition],
        queued: _Queued,
        graph: GraphUse | None,
        without_mask: Mapping[int, RowFailure] = NO_FAILURES,
        *,
        limited: bool = False,
    ) -> _Launched:
        download = self._device.download(queued.tensors())
        self._note_flying(plan, places, queued.tokens)
        return _Launched(plan, order, places, without_mask, limited, graph, queued, download)

    def _must_know(self, plan: StepPlan) -> bool:
        """Whether the host must read a token in flight first, for a row's grammar. Penalties and bad words look at it
        on the device."""
        return any(row.request_id in self._flying and _has_grammar(row) for row in plan.rows)

    def _pending(self, plan: StepPlan) -> list[Pending]:
        begins = accumulate((len(row.token_ids) for row in plan.rows), initial=0)
        found = []
        for begin, row in zip(begins, plan.rows, strict=False):
            if row.token_ids[0] == PENDING_TOKEN and row.request_id in self._flying:
                tokens, index = self._flying[row.request_id]
                if index is None:
                    raise ValueError(f"{row.request_id} goes on from drafts that are in flight.")
                found.append(Pending(begin, tokens, index))
        return found

    def _queue(
        self, plan: StepPlan, places: Sequence[SamplePosition], computed: Computed, within: Within | None
    ) -> _Queued:
        queued = _Queued(scores=self._queue_scores(plan, computed), pooled=sum_pooled(plan, computed.hidden))
        if not places:
            return queued
        how = self._answers.sampled(plan, places, self._flying)
        seen = self._counts.rows(
            [plan.rows[place.number].request_id for place in places],
            how.rows,
            how.answers,
            begun={row.request_id for row in plan.rows if row.kind is RowKind.LAST},
            flying=self._flying,
        )
        logits = computed.logits  # [places, vocab]
        tokens = queued.tokens = choose_on_device(self._device, self.model.ops, logits, *how, within, seen)
        self.model.share(tokens)
        asking = [number for number, row in enumerate(how.rows) if row.num_logprobs is not None]
        for first in range(0, len(asking), SCORED_POSITIONS):
            piece = asking[first : first + SCORED_POSITIONS]
            numbers = self._device.upload(torch.tensor(piece))
            most = max(how.rows[number].num_logprobs or 0 for number in piece)
            queued.logprobs.append(self._logprobs(logits[numbers], tokens[numbers].clamp(min=0), most))
        return queued

    def _logprobs(self, logits: Tensor, token_ids: Tensor, most: int) -> _Found:
        find = self.model.ops.logprobs or find_logprobs
        return find(logits, token_ids, min(most, logits.shape[1]))

    def _queue_scores(self, plan: StepPlan, computed: Computed) -> list[_Score]:
        flat = [score for row in wanted_scores(plan.rows).values() for score in row]
        found = []
        for first in range(0, len(flat), SCORED_POSITIONS):
            index, token_ids, counts = zip(*flat[first : first + SCORED_POSITIONS], strict=True)
            there = self._device.upload(torch.tensor(token_ids))
            logits = computed.logits_at(torch.tensor(index))
            found.append((*self._logprobs(logits, there, max(counts)), find_ranks(logits, there)))
        return found

    def _note_flying(self, plan: StepPlan, places: Sequence[SamplePosition], tokens: Tensor | None) -> None:
        for index, place in enumerate(places):
            assert tokens is not None
            row = plan.rows[place.number]
            has_drafts = place.offset > 0 and row.kind is RowKind.DECODE
            self._flying[row.request_id] = (tokens, None if has_drafts else index)

    # --- collect ------------------------------------------------------------------------------------------------------

    def collect(self) -> StepOutput:
        launched = self._launched.popleft()
        if launched.output is None:
            self._read(launched)
        assert launched.output is not None
        return launched.output

    def _read_all(self) -> None:
        for launched in self._launched:
            if launched.output is None:
                self._read(launched)

    def _read(self, launched: _Launched) -> None:
        """Wait for the step and make its output. Steps are read in the order in which they were launched."""
        plan, queued = launched.plan, launched.queued
        for row in plan.rows:
            flying = self._flying.get(row.request_id)
            if flying is not None and flying[0] is queued.tokens:
                del self._flying[row.request_id]
        with device_faults():
            parts = deque(self.model.ranks.wait(launched.download))
        sampled = [] if queued.tokens is None else parts.popleft().tolist()
        pooled, without_state = pooled_by_row(plan, None if queued.pooled is None else parts.popleft())
        tokens: dict[int, list[int | None]] = {}
        for place, token in zip(launched.places, sampled, strict=True):
            tokens.setdefault(place.number, []).append(None if token == NO_TOKEN else token)
        logprobs = self._read_sampled(launched, sampled, parts)
        scores = self._read_scores(launched, parts)
        failed = {**launched.without_mask, **self._answers.lost(plan), **without_state}
        output = make_output(plan, tokens, logprobs, scores, pooled, failed, self._answers.no_token)
        output = self._answers.keep(plan, output, limited=launched.limited, forgotten=launched.forgotten)
        output = replace(output, graph=launched.graph)
        launched.output = output if launched.order is None else in_plan_order(output, launched.order)

    def _read_sampled(
        self, launched: _Launched, sampled: Sequence[int], parts: deque[Tensor]
    ) -> dict[int, list[TokenLogprobs | None]]:
        """By row, the log-probabilities of sampled tokens, for rows that ask for them."""
        rows = [launched.plan.rows[place.number].sampling for place in launched.places]
        asking = [
            (number, row.num_logprobs)
            for number, row in enumerate(rows)
            if row is not None and row.num_logprobs is not None
        ]
        found: dict[int, list[TokenLogprobs | None]] = {}
        for first in range(0, len(asking), SCORED_POSITIONS):
            numbers, counts = zip(*asking[first : first + SCORED_POSITIONS], strict=True)
            tokens = [sampled[number] for number in numbers]
            for number, logprob in zip(numbers, read_logprobs(_three(parts), tokens, counts), strict=True):
                found.setdefault(launched.places[number].number, []).append(logprob)
        return found

    def _read_scores(self, launched: _Launched, parts: deque[Tensor]) -> dict[int, tuple[TokenLogprobs, ...] | None]:
        wanted = wanted_scores(launched.plan.rows)
        flat = [score for row in wanted.values() for score in row]
        found: list[TokenLogprobs | None] = []
        for first in range(0, len(flat), SCORED_POSITIONS):
            _, token_ids, counts = zip(*flat[first : first + SCORED_POSITIONS], strict=True)
            found += read_logprobs(_three(parts), token_ids, counts, parts.popleft())
        return scores_by_row(wanted, found)

    # --- requests that are gone ---------------------------------------------------------------------------------------

    def forget(self, request_ids: Sequence[str]) -> None:
        self._answers.forget(request_ids)
        self._counts.forget(request_ids)
        for request_id in request_ids:
            self._flying.pop(request_id, None)
        for launched in self._launched:
            launched.forgotten.update(request_ids)

    def shutdown(self) -> None:
        """Drop weights and cache. No step can run afterwards; a second call finds nothing to drop."""
        self._launched.clear()
        self._flying.clear()
        self._answers.shutdown()
        if self._kv_mover is not None:
            self._kv_mover.shutdown()
        if self._claim is not None:
            self._claim.release()
        with suppress(AttributeError):
            del self.model
            del self._counts
            del self._device
        if self._ranks is not None:  # after the captured steps, which have the group's sums in them
            self._ranks.end()
            self._ranks = None

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        self._threads.use()
        with self.model.ranks.together():
            computed = self.model.forward(plan, self._answers.newest)
            return computed.logits_at(torch.arange(plan.num_tokens)).cpu()


def _three(parts: deque[Tensor]) -> _Found:
    return parts.popleft(), parts.popleft(), parts.popleft()


def _has_grammar(row: ScheduledRequest) -> bool:
    return row.sampling is not None and row.sampling.controls is not None and row.sampling.controls.grammar is not None
