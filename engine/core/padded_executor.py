"""Owns the padding of a rank's steps to the shape that all ranks agreed on: as many forward passes, each of that shape.
Never decides what is computed: a rank without rows of its own, or whose own failed, makes the exchanges too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from engine.lockstep.shape import NO_STEP, StepShape
from engine.step import Capabilities, Executor, ExecutorFatalError, StepOutput, StepPlan

logger = logging.getLogger(__name__)

PADDING = StepPlan(-1, ())
"""A forward pass of nothing."""


class PaddedExecutor:
    """An executor whose launches are counted: between `begin` and `pad` there are `joint.forwards`, neither more nor
    fewer."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._joint = NO_STEP
        self._num_left = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._executor.capabilities

    def begin(self, joint: StepShape) -> None:
        """Begin a step of this shape, which has room for whatever will be launched in it."""
        self._joint, self._num_left = joint, joint.forwards

    def launch(self, plan: StepPlan) -> None:
        assert self._num_left > 0, f"the ranks agreed on {self._joint}, and this is one pass more"
        self._num_left -= 1
        self._executor.launch(replace(plan, joint=self._joint))

    def pad(self) -> None:
        """Launch the passes of the step that this rank has no rows for.

        Raises:
            ExecutorFatalError: the executor can run no further step.
        """
        while self._num_left > 0:
            try:
                self.launch(PADDING)
            except ExecutorFatalError:
                raise
            except Exception:  # its exchanges were made, and no request of this rank needs anything of it
                logger.exception("padding of %s failed", self._joint)

    def collect(self) -> StepOutput:
        return self._executor.collect()

    def forget(self, request_ids: Sequence[str]) -> None:
        self._executor.forget(request_ids)

    def shutdown(self) -> None:
        self._executor.shutdown()
