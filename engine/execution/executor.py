"""Owns one model on one device: runs the steps of plans, in order.
Never schedules, and keeps of a request only its newest token, K and V in the plan's blocks, and state in its slots."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch.grammar import Grammars
from engine.batch.inputs import is_lost
from engine.batch.logit_controls import Within
from engine.batch.logprobs import prompt_logprobs, sampled_logprobs
from engine.batch.row_order import Place, in_kernel_order, in_plan_order, num_accepted, sampled_places
from engine.batch.sampler import sample
from engine.execution.device import device_faults
from engine.execution.draft_model import DraftModel
from engine.host.shares import Claim
from engine.models.adapted import AdaptedModel
from engine.models.computed import Computed, Model
from engine.protocol import TokenLogprobs
from engine.step import (
    Capabilities,
    ExecutorOutOfMemoryError,
    GrammarRow,
    RowFailure,
    RowKind,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    answer_tokens,
    grammar_rows,
)

NO_LOGIT = RowFailure("The model gave no finite logit.")
NO_STATE = RowFailure("The model gave no finite hidden state.")
LOST_STATE = "There is no memory for the step, and it cannot be run again: recurrent states may have moved on."
LOST_TOKEN = RowFailure("The token to go on from was not sampled: its row failed in the step before.")

_Masks = tuple[Within | None, dict[int, RowFailure]]
"""What grammars allow, and why rows have no mask, by row."""


class StateLostError(Exception):
    """A step failed for want of memory, and its requests' recurrent states with it."""


class TorchExecutor:
    """An engine.step.Executor for the CPU, where a step is done when `launch` returns."""

    def __init__(
        self,
        model: Model,
        *,
        num_threads: int,
        grammars: Grammars | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`num_threads`: of torch's operators. `grammars`: None where the model's directory has no tokenizer, or no
        token that ends an answer. `draft_model`: proposes what plans leave open."""
        self.model = model
        self._grammars = grammars
        self._draft_model = draft_model
        self._masker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-masks")
        self._num_threads = num_threads
        self._thread: int | None = None
        self._outputs: deque[StepOutput] = deque()
        self._newest: dict[str, int] = {}  # request id -> the token it sampled last
        self.claim: Claim | None = None
        """On the machine's memory."""

    @property
    def capabilities(self) -> Capabilities:
        compile_grammar = None if self._grammars is None else self._grammars.compile
        return Capabilities(
            mixed_rows=True,
            overlap=True,
            drafts=True,
            draft_model=self._draft_model is not None,
            recurrent_state=self.model.state is not None,
            compile_grammar=compile_grammar,
            adapters=self.model if isinstance(self.model, AdaptedModel) else None,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Run the step. A failure is an ordinary exception: rows of other plans are not affected.

        Raises:
            ValueError: the plan breaks the seam's contract.
            ExecutorOutOfMemoryError: there is no memory for the activations of so many tokens.
            StateLostError: the same, of a model with recurrent state.
        """
        with device_faults():
            with self._advancing(plan):
                output = self._run(plan)
            self._outputs.append(output)

    @contextmanager
    def _advancing(self, plan: StepPlan) -> Iterator[None]:
        """Copies of recurrent state around a step. It cannot be tried again once states may have moved on in place, so
        that a want of memory fails its rows."""
        if (state := self.model.state) is None:
            yield
            return
        state.place(plan)
        try:
            with device_faults():
                yield
        except ExecutorOutOfMemoryError as error:
            raise StateLostError(LOST_STATE) from error
        state.save(plan)

    def _run(self, planned: StepPlan) -> StepOutput:
        if self._draft_model is not None:
            planned = self._draft_model.fill(planned)
        plan, order = in_kernel_order(planned)
        places = sampled_places(plan.rows)
        with self._masks(plan, places) as masks:
            computed = self._forward(plan)
        within, failed = masks.result()
        tokens, logprobs = self._sample(plan, places, computed, within)
        scores = prompt_logprobs(plan.rows, computed.logits_at)
        failed |= {number: LOST_TOKEN for number, row in enumerate(plan.rows) if is_lost(row, self._newest)}
        pooled, without_state = pooled_by_row(plan, sum_pooled(plan, computed.hidden))
        failed |= without_state
        output = make_output(plan, tokens, logprobs, scores, failed)
        if computed.rewind is not None:
            computed.rewind.to([len(of) for of in output.sampled])
        if within is not None:
            output = replace(output, drafts=self._forced(plan, output))
        if pooled:
            output = replace(output, pooled=pooled)
        self._keep_newest(plan, output)
        return output if order is None else in_plan_order(output, order)

    @contextmanager
    def _masks(self, plan: StepPlan, places: Sequence[Place]) -> Iterator[Future[_Masks]]:
        """What grammars allow at `places`, and rows that have no mask: found while the body runs, there at its end."""
        rows = grammar_rows(plan, self._newest)
        if not rows:
            done: Future[_Masks] = Future()
            done.set_result((None, {}))
            yield done
            return
        assert self._grammars is not None
        found = self._masker.submit(self._fill_masks, rows, places)
        try:
            yield found
        finally:
            wait([found])  # the matchers are nobody else's until then

    def _fill_masks(self, rows: Sequence[tuple[int, GrammarRow]], places: Sequence[Place]) -> _Masks:
        assert self._grammars is not None
        words, failed = self._grammars.masks([row for _, row in rows])
        numbers = {number for number, _ in rows}
        limited = torch.tensor([i for i, place in enumerate(places) if place.number in numbers])
        return Within(limited, torch.from_numpy(words)), {rows[i][0]: why for i, why in failed.items()}

    def _sample(
        self, plan: StepPlan, places: Sequence[Place], computed: Computed, within: Within | None
    ) -> tuple[dict[int, list[int | None]], dict[int, list[TokenLogprobs | None]]]:
        """Tokens, and log-probabilities of those that were asked for, by row."""
        if not places:
            return {}, {}
        rows = [plan.rows[place.number] for place in places]
        wanted = [row.sampling for row in rows if row.sampling is not None]
        logits = computed.logits.float()  # [places, vocab]
        positions = [row.start + place.offset + 1 for row, place in zip(rows, places, strict=True)]
        answers = [self._answer(row, place.offset) for row, place in zip(rows, places, strict=True)]
        sampled = sample(logits, wanted, positions, answers, within, computed.best, computed.draw)
        scored = sampled_logprobs(logits, wanted, sampled)
        tokens: dict[int, list[int | None]] = {}
        logprobs: dict[int, list[TokenLogprobs | None]] = {}
        for i, place in enumerate(places):
            tokens.setdefault(place.number, []).append(sampled[i])
            if i in scored:
                logprobs.setdefault(place.number, []).append(scored[i])
        return tokens, logprobs

    def _answer(self, row: ScheduledRequest, offset: int) -> tuple[int, ...]:
        """What the answer holds once token `offset` of the row is part of it; () where no control looks back."""
        answer = answer_tokens(row, self._newest)
        return (*answer, *row.token_ids[1 : offset + 1]) if answer and row.kind is RowKind.DECODE else answer

    def _forced(self, plan: StepPlan, output: StepOutput) -> dict[int, tuple[int, ...]]:
        """What grammars force to follow, by row."""
        assert self._grammars is not None
        return {
            number: forced
            for number, row in grammar_rows(plan, self._newest)
            if output.sampled[number] and (forced := self._grammars.forced(row.request_id, output.sampled[number]))
        }

    def _keep_newest(self, plan: StepPlan, output: StepOutput) -> None:
        """What PENDING_TOKEN stands for in the next step: nothing where this one failed, lest it be an older token."""
        for number, _ in output.failed:
            self._newest.pop(plan.rows[number].request_id, None)
        for row, tokens in zip(plan.rows, output.sampled, strict=True):
            if tokens:
                self._newest[row.request_id] = tokens[-1]

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._newest.pop(request_id, None)
            if self._grammars is not None:
                self._grammars.forget(request_id)

    def shutdown(self) -> None:
        """Drop weights and cache. No step can run afterwards; a second call finds nothing to drop."""
        self._outputs.clear()
        self._newest.clear()
        self._masker.shutdown()
        self._draft_model = None
        with suppress(AttributeError):
            del self.model
        if self.claim is not None:
            self.claim.release()

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the step and return the logits of every token, for tests and offline scoring. # [num_tokens, vocab]"""
        return self._forward(plan).logits_at(torch.arange(plan.num_tokens)).clone()

    def _forward(self, plan: StepPlan) -> Computed:
        self._set_threads()
        return self.model.forward(plan, self._newest)

    def _set_threads(self) -> None:
        """OpenMP keeps its thread count per calling thread, so it is set in the one that runs the steps."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._num_threads)
            self._thread = threading.get_ident()


def sum_pooled(plan: StepPlan, hidden: Tensor) -> Tensor | None:
    """Sums of hidden states, where they are. hidden: [num_tokens, hidden], of all rows; # [pooled rows, hidden]"""
    sums = []
    begin = 0  # the row's first token among those of the step
    for row in plan.rows:
        if row.pool_from is not None:
            sums.append(hidden[begin + row.pool_from - row.start : begin + len(row.token_ids)].float().sum(dim=0))
        begin += len(row.token_ids)
    return torch.stack(sums) if sums else None


def pooled_by_row(plan: StepPlan, sums: Tensor | None) -> tuple[dict[int, tuple[float, ...]], dict[int, RowFailure]]:
    """What `sum_pooled` found, on the host, and why rows have failed by it."""
    if sums is None:
        return {}, {}
    numbers = [number for number, row in enumerate(plan.rows) if row.pool_from is not None]
    pooled = dict(zip(numbers, map(tuple, sums.tolist()), strict=True))
    return pooled, {number: NO_STATE for number, of in pooled.items() if not all(map(math.isfinite, of))}


def make_output(
    plan: StepPlan,
    tokens: Mapping[int, Sequence[int | None]],
    logprobs: Mapping[int, Sequence[TokenLogprobs | None]],
    scores: Mapping[int, tuple[TokenLogprobs, ...] | None],
    failed: dict[int, RowFailure],
) -> StepOutput:
    """What each row asked for, by row, as far as its drafts were right; a row that lacks any of it, or is in `failed`,
    returns nothing else."""
    sampled: dict[int, tuple[int, ...]] = {}
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    failed = {number: NO_LOGIT for number, found in scores.items() if found is None} | failed
    for number, found in tokens.items():
        row = plan.rows[number]
        count = num_accepted(row.token_ids[1:], found) if row.kind is RowKind.DECODE else 1
        sampled[number] = tuple(token for token in found[:count] if token is not None)
        scored[number] = tuple(of for of in logprobs.get(number, ())[:count] if of is not None)
        if len(sampled[number]) < count or (number in logprobs and len(scored[number]) < count):
            failed.setdefault(number, NO_LOGIT)
    return StepOutput(
        plan.step_id,
        sampled=tuple(sampled.get(number, ()) if number not in failed else () for number in range(len(plan.rows))),
        failed=tuple(sorted(failed.items())),
        logprobs={number: of for number, of in scored.items() if of and number not in failed},
        prompt_logprobs={number: of for number, of in scores.items() if of is not None and number not in failed},
    )
