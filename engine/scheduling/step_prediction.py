"""Owns the prediction of step times while an engine runs: fitted costs, corrected by what its steps really took.
Never reads a clock: it is told how long a step took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from engine.protocol import StepCorrection
from engine.scheduling.step_time import StepCosts, StepWork, chunk_work

MEMORY_STEPS = 200
"""Steps after which an error of the past counts a third."""
RECENT_STEPS = 12
"""The same once the machine has changed: a neighbour that came or went is followed within some dozens of steps."""
MOST_DRIFT = math.log(1.25)
"""The machine has changed if the logarithms of measured to predicted times are further from 0, on average over the
recent steps. Single steps that were late do not do that, and differing errors of one prediction cancel out."""
SPREAD_STEPS = 64
"""Steps after which an error counts a third in the deviation."""
PRIOR_STEPS = 16
"""At first the fit counts like so many steps."""
LEAST_PRIOR = 0.5
"""It always counts like this share of a step: steps that are all alike do not tell a factor from an added time."""
MOST_SCALE = 4.0
"""The correction stays between a quarter of the fitted times and four times them. Beyond that the costs were measured
on another machine, and are to be measured again."""
MOST_SURPRISE = 2.0
"""One step counts as at most twice or half its prediction: a process that was stopped says nothing about the next."""
LEAST_STEP_S = 1e-4
"""What the shortest step is taken to last at least, where costs say less."""


class RowCosts(NamedTuple):
    """What a row adds to a step, in seconds for each token, sampled token, key, and position attended to."""

    token_s: float
    sample_s: float
    key_s: float
    attended_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted at one moment. It never changes, so that a plan is a function of its view.

    seconds = extra_s + scale * (what the fitted costs say)
    """

    costs: StepCosts
    scale: float = 1.0
    extra_s: float = 0.0
    """Time that every step takes besides the executor: planning, applying, sending."""
    deviation: float = 0.0
    """Relative deviation of steps from their predictions, as a root mean square."""

    def seconds(self, work: StepWork) -> float:
        """Return the predicted duration of a step."""
        return self.extra_s + self.scale * self.costs.seconds(work)

    def row_costs(self, tokens: int) -> RowCosts:
        """Return what one row more adds to a step of so many tokens."""
        costs, scale = self.costs, self.scale
        return RowCosts(
            scale * costs.token_s(tokens), scale * costs.sample_s, scale * costs.key_s, scale * costs.attended_s
        )

    def fitted(self, seconds: float) -> float:
        """Return what the fitted costs say of a step that is predicted to take `seconds`."""
        return (seconds - self.extra_s) / self.scale

    def prefill_seconds(self, start: int, end: int, step_tokens: int) -> float:
        """Return how long the positions [start, end) of a prompt take in steps of their own of `step_tokens`."""
        total = 0.0
        while start < end:
            count = min(step_tokens, end - start)
            total += self.seconds(chunk_work(start, count, last=start + count == end))
            start += count
        return total


class StepTimeModel:
    """Predicts step times, and follows the machine with two numbers: a factor, as for a noisy neighbour, and a time
    that is added to each step, as for the work of the host. Both follow within some hundred steps, or dozens if the
    machine has changed, by least squares over relative errors in which older steps count less, and never leave their
    bounds."""

    def __init__(self, costs: StepCosts, *, deviation: float, scale: float = 1.0) -> None:
        """`deviation`: the relative deviation of measured steps from `costs`, such as 0.05. `scale`: what the costs are
        multiplied by at first."""
        self._shortest = max(costs.curve_s[0], LEAST_STEP_S)
        self._square = deviation**2
        self._drift = 0.0
        self._start = scale
        # The normal equations of seconds / fitted = extra * (shortest / fitted) + scale.
        self._extras, self._extra_sum, self._both = float(PRIOR_STEPS), 0.0, 0.0
        self._scales, self._scale_sum = float(PRIOR_STEPS), PRIOR_STEPS * scale
        self.now = Prediction(costs, scale, 0.0, deviation)
        """What is predicted now."""

    @property
    def correction(self) -> StepCorrection:
        return StepCorrection(self.now.scale, self.now.extra_s, self.now.deviation)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Correct the model by a step that took `seconds`."""
        now = self.now
        predicted, fitted = now.seconds(work), now.costs.seconds(work)
        if min(seconds, predicted, fitted) <= 0:
            return  # no ratio
        seconds = min(max(seconds, predicted / MOST_SURPRISE), predicted * MOST_SURPRISE)
        error = math.log(seconds / predicted)
        self._drift += (error - self._drift) / RECENT_STEPS
        memory = RECENT_STEPS if abs(self._drift) > MOST_DRIFT else MEMORY_STEPS
        self._add(self._shortest / fitted, seconds / fitted, kept=1 - 1 / memory)
        scale, extra_s = self._solve()
        self._square += (error**2 - self._square) / SPREAD_STEPS
        self.now = Prediction(now.costs, scale, extra_s, math.sqrt(self._square))

    def _add(self, x: float, y: float, *, kept: float) -> None:
        self._extras = kept * self._extras + x * x
        self._both = kept * self._both + x
        self._scales = kept * self._scales + 1.0
        self._extra_sum = kept * self._extra_sum + x * y
        self._scale_sum = kept * self._scale_sum + y

    def _solve(self) -> tuple[float, float]:
        """Return (factor, added seconds)."""
        extras, scales = self._extras + LEAST_PRIOR, self._scales + LEAST_PRIOR
        scale_sum = self._scale_sum + LEAST_PRIOR * self._start
        determinant = extras * scales - self._both**2  # positive, because of the prior
        extra = (self._extra_sum * scales - scale_sum * self._both) / determinant
        extra = min(max(extra, 0.0), MOST_SCALE)
        scale = (scale_sum - self._both * extra) / scales
        return min(max(scale, 1 / MOST_SCALE), MOST_SCALE), extra * self._shortest
