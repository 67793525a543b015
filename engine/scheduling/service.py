"""Owns what service counts against a tenant's share: predicted seconds where steps are predicted, else tokens.
Never knows a tenant or a request: it is told of positions that were computed."""

from __future__ import annotations

from typing import Protocol

from engine.config import ResolvedConfig
from engine.protocol import num_pairs
from engine.scheduling.step_prediction import RowCosts, StepTimeModel


class Service(Protocol):
    """A unit of service. What counts does not depend on how a prompt is cut or on the rows beside it."""

    def begin(self, num_tokens: int) -> None:
        """Note that a step of so many tokens begins."""
        ...

    def prompt(self, start: int, end: int) -> float:
        """Return what the positions [start, end) of a prompt count."""
        ...

    def answer(self, start: int, end: int, *, decoded: bool) -> float:
        """Return what a row counts that sampled tokens: all of the row [start, end) if it `decoded`, else one token
        after a prompt that was counted before."""
        ...


class CountedTokens:
    """A token of a prompt counts 1, and a token of an answer `answer_weight`."""

    def __init__(self, answer_weight: float) -> None:
        self._answer_weight = answer_weight

    def begin(self, num_tokens: int) -> None:
        """All steps are alike."""

    def prompt(self, start: int, end: int) -> float:
        return end - start

    def answer(self, start: int, end: int, *, decoded: bool) -> float:
        return self._answer_weight * (end - start if decoded else 1)


class PredictedSeconds:
    """A row counts what the step would be shorter without it: a long context costs its tenant more than a short one.
    The time that a step takes in any case, such as that of reading the weights, is nobody's."""

    def __init__(self, model: StepTimeModel, most: int) -> None:
        """`most`: prefill tokens of a full step, as which prompts count."""
        self._model = model
        self._most = most
        self.begin(1)

    def begin(self, num_tokens: int) -> None:
        """Look up once a step what its rows cost: it may have hundreds."""
        self._costs: RowCosts = self._model.now.row_costs(num_tokens)
        self._fixed_s = self._costs.token_s + self._costs.sample_s
        self._position_s = self._costs.key_s + self._costs.attended_s

    def prompt(self, start: int, end: int) -> float:
        if end <= start:
            return 0.0
        costs, count = self._model.now.row_costs(self._most), end - start
        full, rest = divmod(count, self._most)
        keys = full * start + self._most * full * (full + 1) // 2 + (end if rest else 0)  # of each chunk, to its end
        return costs.token_s * count + costs.key_s * keys + costs.attended_s * num_pairs(start, end)

    def answer(self, start: int, end: int, *, decoded: bool) -> float:
        if not decoded:
            return self._costs.sample_s
        count = end - start
        if count == 1:  # the usual case, for each row of each step
            return self._fixed_s + self._position_s * end
        return self._fixed_s * count + self._costs.key_s * end + self._costs.attended_s * num_pairs(start, end)


def service_of(config: ResolvedConfig, model: StepTimeModel | None) -> Service:
    """Return the unit of an engine: time if a model predicts its steps."""
    if model is None:
        return CountedTokens(config.scheduler.answer_token_weight)
    return PredictedSeconds(model, min(config.max_prefill_tokens, config.max_num_batched_tokens))
