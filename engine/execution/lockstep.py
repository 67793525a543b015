"""Owns the steps of a rank that shares a mixture's experts: a plan's exchanges are all made, with rows or without.
Never decides a step's shape, and never goes on where rows of other ranks were not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.execution.executor import TorchExecutor
from engine.execution.ranks import all_or_none
from engine.models.expert_ranks import DividedModel
from engine.step import Capabilities, ExecutorFatalError, RanksEndedError, StepOutput, StepPlan
from kernels.collectives.group import Group, RankLostError

_LOST = "The ranks that share the experts have stopped together"
_FAILED = "A step of ranks that share experts failed"


class LockstepExecutor:
    """A ModelExecutor whose plans have a joint shape: see engine.step.Executor. Exchanges depend on the number of
    forward passes alone: ranks may bring different numbers of rows to each, and a draft model is whole on each rank."""

    def __init__(self, executor: TorchExecutor, model: DividedModel, group: Group) -> None:
        """executor: runs `model`. group: the ranks that have the experts between them; it ends with the executor."""
        self._executor = executor
        self._divided: DividedModel | None = model
        self._group = group

    @property
    def model(self) -> DividedModel:
        assert self._divided is not None, "the executor was shut down"
        return self._divided

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._executor.capabilities, lockstep=True)

    def launch(self, plan: StepPlan) -> None:
        assert plan.joint is not None, "a rank's steps have a joint shape"
        self.model.begin_pass()
        failure: Exception | None = None
        with all_or_none(self._group, RanksEndedError, lost=_LOST, failed=_FAILED):
            self._executor.use_threads()  # also without rows: this rank computes those that others send
            if plan.rows:
                try:
                    self._executor.launch(replace(plan, joint=None))
                except (ExecutorFatalError, RankLostError):
                    raise
                except Exception as error:  # noqa: BLE001 - raised below, once the others have what they need
                    failure = error
            self.model.finish_pass()
        if failure is not None:
            raise failure

    def collect(self) -> StepOutput:
        return self._executor.collect()

    def forget(self, request_ids: Sequence[str]) -> None:
        self._executor.forget(request_ids)

    def shutdown(self) -> None:
        """Also ends the group, so that the exchanges of other ranks fail. A second call does nothing."""
        if self._divided is not None:
            self._divided = None
            self._executor.shutdown()
            self._group.close()

    def logits(self, plan: StepPlan) -> Tensor:
        """See ModelExecutor. All ranks must call it at the same time."""
        return self._executor.logits(plan)
