"""Owns how much prefill a step may carry beside its decode rows, by time: what their target leaves.
Never reads a clock, and never knows a request: it is told of rows by their sizes."""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduling.step_prediction import Prediction
from engine.scheduling.step_time import StepWork

MARGIN = 2.5
"""Deviations of the prediction that are kept free below the target."""
LEAST_SHARE, MOST_SHARE = 0.1, 0.5
"""Prefill may take this share of the target even if decode rows leave less, so that prompts always advance: the least
until the first prompt is late, and then more the later it is."""


def step_limit(target_s: float, decode_s: float, lateness: float = 0.0) -> float:
    """Return how long a step may take, if its decode rows alone take `decode_s`.

    lateness: how long the first prompt has waited, as a multiple of its own target. Where decode rows alone exceed
    theirs, it is lost in any case. Then prefill gets as much time as they are late, and at most as much as they take:
    streams become slower, and prompts do not stand still.
    """
    late = max(decode_s - target_s, 0.0)
    share = min(LEAST_SHARE * max(lateness, 1.0), MOST_SHARE)
    return max(target_s, decode_s + min(share * target_s + late, decode_s))


class TimeBudget:
    """The time of one step that carries decode rows."""

    def __init__(
        self, prediction: Prediction, target_s: float, decodes: StepWork, lateness: Callable[[], float] | None = None
    ) -> None:
        """`target_s`: the longest that the decode rows may wait for their next tokens. `decodes`: their work.
        `lateness`: see step_limit; asked only where the decode rows leave so little that it matters."""
        target_s /= 1 + MARGIN * prediction.deviation
        decode_s = prediction.seconds(decodes)
        late = lateness() if lateness is not None and decode_s > (1 - MOST_SHARE) * target_s else 0.0
        limit_s = step_limit(target_s, decode_s, late)
        self._costs = costs = prediction.costs
        self._tokens = decodes.tokens
        # Kept as one number: a step has dozens of chunks, and is planned while the device waits.
        self._left_s = prediction.fitted(limit_s) - costs.rest_s(decodes)

    def most(self, start: int, tokens: int) -> int:
        """Return how many tokens of a prompt after `start` others the step can still take: 0 to `tokens`."""
        return self._costs.tokens_within(self._left_s - self._costs.sample_s, self._tokens, start, tokens)

    @property
    def least(self) -> int:
        """How many tokens of a prompt the step takes if it takes any: with fewer, it would be padded to as many."""
        return self._costs.padding_beside(self._tokens)

    def take(self, start: int, count: int, *, last: bool) -> None:
        """Note that the step has a chunk of `count` tokens from `start`; `last` if it completes its prompt."""
        self._tokens += count
        self._left_s -= self._costs.reading_s(start, count) + (self._costs.sample_s if last else 0.0)
