"""Owns one model on the CPU: runs the steps of plans, in order.
Never schedules. Of a request it keeps only the newest token, K and V in the plan's blocks, and state in its slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from engine.batch.grammar import Grammars
from engine.batch.logit_controls import Within
from engine.batch.logprobs import prompt_logprobs, sampled_logprobs
from engine.batch.row_order import (
    SamplePosition,
    in_kernel_order,
    in_plan_order,
    make_output,
    pooled_by_row,
    sampled_positions,
    sum_pooled,
)
from engine.batch.sampler import sample
from engine.execution.answers import Answers
from engine.execution.device import TorchThreads, advancing, device_faults
from engine.execution.draft_model import DraftModel
from engine.execution.ranks import Ranks
from engine.host.shares import Claim
from engine.kv_tiers import KvMover
from engine.models.computed import Computed, Model
from engine.protocol import TokenLogprobs
from engine.step import Capabilities, Executor, ExecutorFatalError, StepOutput, StepPlan


class ModelExecutor(Executor, Protocol):
    """An executor that computes a model, on any device."""

    @property
    def model(self) -> Model: ...

    def logits(self, plan: StepPlan) -> Tensor:
        """Run the step and return the logits of every token on the CPU, for tests and offline scoring.
        # [num_tokens, vocab]"""


class TorchExecutor:
    """A ModelExecutor for the CPU, where a step is done when `launch` returns."""

    def __init__(
        self,
        model: Model,
        *,
        num_threads: int,
        grammars: Grammars | None = None,
        draft_model: DraftModel | None = None,
        kv_mover: KvMover | None = None,
        ranks: Ranks | None = None,
        claim: Claim | None = None,
    ) -> None:
        """num_threads: for torch's operators. grammars: see Answers. draft_model: fills in the drafts that plans leave
        open. kv_mover: moves the model's KV; it ends with the executor. ranks: the others that compute the model;
        they end with the executor. claim: on the machine's memory; given up at shutdown."""
        self.model = model
        self._answers = Answers(grammars)
        self._draft_model = draft_model
        self._kv_mover = kv_mover
        self._ranks = ranks
        self._claim = claim
        self._threads = TorchThreads(num_threads)
        self._outputs: deque[StepOutput] = deque()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            mixed_rows=True,
            overlap=True,
            drafts=True,
            draft_model=self._draft_model is not None,
            recurrent_state=self.model.state is not None,
            grammars=self._answers.grammars,
            adapters=self.model.adapters,
            kv_mover=self._kv_mover,
            ranks=self._ranks,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Run the step. A failure is an ordinary exception: rows of other plans are not affected.

        Raises:
            ValueError: the plan breaks the contract of engine.step.
            ExecutorFatalError: the same and all others, for a model with recurrent state on several ranks.
            ExecutorOutOfMemoryError: there is no memory for the activations of so many tokens.
            StateLostError: the same, for a model with recurrent state.
        """
        with device_faults():
            with advancing(self.model.state, plan), self._all_ranks_advance():
                output = self._run(plan)
            self._outputs.append(output)

    @contextmanager
    def _all_ranks_advance(self) -> Iterator[None]:
        """The states of this rank may have moved on, and those of others not, or the other way round."""
        try:
            yield
        except Exception as error:
            if self._ranks is None or self.model.state is None or isinstance(error, ExecutorFatalError):
                raise
            raise ExecutorFatalError(f"A step failed, and ranks may have different states: {error}") from error

    def _run(self, planned: StepPlan) -> StepOutput:
        if self._draft_model is not None:
            planned = self._draft_model.fill(planned)
        plan, order = in_kernel_order(planned)
        places = sampled_positions(plan.rows)
        with self._answers.masks(plan, places) as masks:
            computed = self._forward(plan)
        within, without_mask = masks.result()
        tokens, logprobs = self._sample(plan, places, computed, within)
        scores = prompt_logprobs(plan.rows, computed.logits_at)
        pooled, without_state = pooled_by_row(plan, sum_pooled(plan, computed.hidden))
        failed = {**without_mask, **self._answers.lost(plan), **without_state}
        output = make_output(plan, tokens, logprobs, scores, pooled, failed, self._answers.no_token)
        if computed.rewind is not None:
            computed.rewind.to([len(row_tokens) for row_tokens in output.sampled])
        output = self._answers.keep(plan, output, limited=within is not None)
        return output if order is None else in_plan_order(output, order)

    def _sample(
        self, plan: StepPlan, places: Sequence[SamplePosition], computed: Computed, within: Within | None
    ) -> tuple[dict[int, list[int | None]], dict[int, list[TokenLogprobs | None]]]:
        """Sampled tokens by row, and log-probabilities by row for rows that ask for them."""
        if not places:
            return {}, {}
        how = self._answers.sampled(plan, places)
        logits = computed.logits.float()  # [places, vocab]
        sampled = sample(logits, *how, within, computed.best, computed.draw)
        scored = sampled_logprobs(logits, how.rows, sampled)
        tokens: dict[int, list[int | None]] = {}
        logprobs: dict[int, list[TokenLogprobs | None]] = {}
        for i, place in enumerate(places):
            tokens.setdefault(place.number, []).append(sampled[i])
            if i in scored:
                logprobs.setdefault(place.number, []).append(scored[i])
        return tokens, logprobs

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def forget(self, request_ids: Sequence[str]) -> None:
        self._answers.forget(request_ids)

    def shutdown(self) -> None:
        """Drop weights and cache. No step can run afterwards; a second call finds nothing to drop."""
        self._outputs.clear()
        self._answers.shutdown()
        if self._kv_mover is not None:
            self._kv_mover.shutdown()
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None
        self._draft_model = None
        with suppress(AttributeError):
            del self.model
        if self._claim is not None:
            self._claim.release()

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        return self._forward(plan).logits_at(torch.arange(plan.num_tokens)).clone()

    def use_threads(self) -> None:
        """Let torch's operators in the calling thread, which runs the steps, have as many threads as this engine's."""
        self._threads.use()

    def _forward(self, plan: StepPlan) -> Computed:
        self.use_threads()
        return self.model.forward(plan, self._answers.newest)
