"""Owns a simulated executor: it returns at once the tokens that a step samples and the time that the step takes.
Never waits or keeps anything about a request: its tokens depend on their positions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from engine.step import Capabilities, ScheduledRequest, StepOutput, StepPlan
from loadtest.sim.step_time import StepTime

EOS = 0
FILLER = 1
"""The token that prompts consist of, except for the tokens that tell them apart."""
FIRST = 2
"""The smallest token id with another meaning."""
VOCAB_SIZE = 2**40


def token_at(position: int) -> int:
    """Return the token that every request has at this position of its answer. So a lost, repeated or moved token
    shows."""
    return FIRST + position


class Noise:
    """Factors of step times: log-normal around `slowness`, and the same for the same seed."""

    def __init__(self, deviation: float = 0.0, seed: str = "", slowness: float = 1.0) -> None:
        self.deviation, self._random = deviation, Random(seed)
        self.slowness = slowness
        """How many times as long each step takes. It may change, as by a noisy neighbour."""

    def factor(self) -> float:
        return self.slowness * (self._random.lognormvariate(0.0, self.deviation) if self.deviation else 1.0)


class TimedExecutor:
    """Samples `token_at` at each position, and the end of sequence where a request's answer ends."""

    def __init__(self, step_time: StepTime, ends: Mapping[str, int], noise: Noise | None = None) -> None:
        """`ends` has, by request id, the position at which the answer ends. A request that moves between engines gets a
        suffix `.2`, `.3` and so on to its id."""
        self._step_time = step_time
        self._noise = noise or Noise()
        self._ends = ends
        self._output = StepOutput(0, ())
        self.seconds = 0.0
        """Time of the steps that were launched since this was last set to 0."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def launch(self, plan: StepPlan) -> None:
        self.seconds += self._step_time.seconds(plan) * self._noise.factor()
        self._output = StepOutput(plan.step_id, tuple(self._sample(row) for row in plan.rows))

    def collect(self) -> StepOutput:
        return self._output

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _sample(self, row: ScheduledRequest) -> tuple[int, ...]:
        if row.sampling is None:
            return ()
        position, name = row.end, row.request_id
        end = self._ends.get(name) or self._ends[name.partition(".")[0]]
        return (EOS if position >= end else token_at(position),)
