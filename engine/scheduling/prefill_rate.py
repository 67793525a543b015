"""Owns how fast prompts advance at present: what prefill takes in wall time, beside the rows that decode.
Never knows a request or a queue: it is told of steps by their work."""

from __future__ import annotations

import math

from engine.config import ResolvedConfig
from engine.protocol import PrefillCosts
from engine.scheduling.planner import PREFILL_ALONE
from engine.scheduling.step_prediction import Prediction, StepTimeModel
from engine.scheduling.step_time import StepWork, chunk_work, decode_work
from engine.scheduling.time_budget import TimeBudget
from engine.step import RowKind, StepPlan

FAR_CHUNKS = 8
"""Costs are predicted for a prompt's first chunk, and for one after this many full chunks."""
MOST_STEPS = 16
"""Costs are predicted again after so many steps, or once another number of requests decodes. That takes some ten
microseconds, and what else they depend on changes slowly."""


class PrefillRate:
    """Follows the steps of one engine."""

    def __init__(self, model: StepTimeModel, config: ResolvedConfig) -> None:
        self._model = model
        self._config = config
        self._alone = PREFILL_ALONE[config.scheduler.batch_mode]
        self._decodes = DecodeRows()
        self._num_steps = 0
        self._costs: tuple[tuple[int, int], PrefillCosts] | None = None  # with what they were predicted for
        self._idle: tuple[int, PrefillCosts] | None = None  # likewise

    def note(self, step: StepPlan, work: StepWork) -> None:
        """Note a step, with its whole work."""
        self._num_steps += 1
        self._decodes.note(step, work)

    def costs(self, num_decoding: int) -> PrefillCosts:
        """Predict what prefill takes beside so many requests that decode."""
        state = num_decoding, self._num_steps // MOST_STEPS
        if self._costs is None or self._costs[0] != state:
            self._costs = state, self._predict(num_decoding)
        return self._costs[1]

    def idle_costs(self) -> PrefillCosts:
        """Predict what prefill takes if nothing else runs."""
        state = self._num_steps // MOST_STEPS
        if self._idle is None or self._idle[0] != state:
            most = max(min(self._config.max_prefill_tokens, self._config.max_num_batched_tokens), 1)
            self._idle = state, prefill_costs(self._model.now, StepWork(0), math.inf, most)
        return self._idle[1]

    def _predict(self, num_decoding: int) -> PrefillCosts:
        config = self._config
        decodes = StepWork(0) if self._alone else self._decodes.work(num_decoding)
        most = max(min(config.max_prefill_tokens, config.max_num_batched_tokens - decodes.tokens), 1)
        return prefill_costs(self._model.now, decodes, config.targets.tpot_s, most)


class DecodeRows:
    """The decode rows of the last step that had some, to say what those of the next step compute."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._work = StepWork(0)

    def note(self, step: StepPlan, work: StepWork) -> None:
        """Note a step, with its whole work. Takes O(rows of prompts): those that decode stand before them."""
        num_rows = len(step.rows)
        prefill = StepWork(0)
        while num_rows and (row := step.rows[num_rows - 1]).kind is not RowKind.DECODE:
            prefill = prefill.plus(chunk_work(row.start, len(row.token_ids), last=row.sampling is not None))
            num_rows -= 1
        if num_rows:
            self._num_rows = num_rows
            self._work = work.minus(prefill)._replace(encoded=0)

    def work(self, num_rows: int) -> StepWork:
        """Return the work of so many rows that are like the last ones."""
        if not self._num_rows:
            return decode_work(num_rows, 0)
        return StepWork(*(amount * num_rows // self._num_rows for amount in self._work))


def prefill_costs(prediction: Prediction, decodes: StepWork, target_s: float, most: int) -> PrefillCosts:
    """Predict what prefill takes beside `decodes`, whose next tokens may take `target_s`; infinity if there is no such
    target. `most` is the number of prefill tokens that a step can have at most."""
    limited = target_s < math.inf and decodes.tokens > 0
    budget = TimeBudget(prediction, target_s, decodes) if limited else None

    def token_s(start: int) -> tuple[float, float]:
        """Return the positions that a token of a chunk from `start` attends to on average, and the seconds it takes."""
        count = most if budget is None else max(budget.most(start, most), min(budget.least, most))
        step_s = prediction.seconds(decodes.plus(chunk_work(start, count, last=False)))
        return start + (count + 1) / 2, step_s / count

    (near, near_s), (far, far_s) = token_s(0), token_s(FAR_CHUNKS * most)
    pair_s = max((far_s - near_s) / (far - near), 0.0)
    return PrefillCosts(max(near_s - pair_s * near, 0.0), pair_s)
