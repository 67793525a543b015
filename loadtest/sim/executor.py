"""Owns a simulated executor: it says what a step samples and how long it takes, at once.
Never waits, and keeps nothing of a request: its tokens depend on their positions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.step import Capabilities, ScheduledRequest, StepOutput, StepPlan
from loadtest.sim.step_time import StepTime

EOS = 0
FILLER = 1
"""What prompts are made of, but for the tokens that tell them apart."""
FIRST = 2
"""The least token that stands for something else."""
VOCAB_SIZE = 2**40


def token_at(position: int) -> int:
    """What every request has at a position of its answer: a token that was lost, repeated or moved would show."""
    return FIRST + position


class TimedExecutor:
    """Samples `token_at` each position, and the end of sequence where a request's answer ends."""

    def __init__(self, step_time: StepTime, ends: Mapping[str, int]) -> None:
        """`ends`: by request id, the position at which its answer is over; a request that moves from engine to engine
        has `.2`, `.3` and so on behind its id."""
        self._step_time = step_time
        self._ends = ends
        self._output = StepOutput(0, ())
        self.seconds = 0.0
        """How long the step took that was launched since this was set to 0."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def launch(self, plan: StepPlan) -> None:
        self.seconds += self._step_time.seconds(plan)
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
