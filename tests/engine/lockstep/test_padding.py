"""Contracts of a rank's steps beside larger ones of others: the exchanges of the joint shape, neither more nor fewer.
Specification: S4-B12, S4-R8, I-32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.fake.executor import FakeExecutor
from engine.lockstep.shape import NO_STEP, StepShape
from engine.protocol import ErrorCode, Failed
from engine.step import ExecutorFatalError, ExecutorOutOfMemoryError, StepPlan
from tests.support.engines import RecordingCore, answer_alone, policy
from tests.support.lockstep import ExpertsExecutor, Log

CUT = {"max_prefill_tokens": 6, "scheduler": policy(chunk_owner="engine")}
JOINT = StepShape(4, 9, 1)


class Rank:
    """One rank, whose step is made beside those of others that the test makes up."""

    def __init__(self, **overrides: Any) -> None:
        self.log = Log([[]])
        self.core = RecordingCore(ranks=self._exchanging, **overrides)

    def _exchanging(self, executor: FakeExecutor) -> ExpertsExecutor:
        self.executor = ExpertsExecutor(executor, 0, self.log)
        return self.executor

    def step(self, joint: StepShape) -> StepShape:
        """Make a step of this shape, check its exchanges, and return the shape that the rank's own would have had."""
        own = self.core.propose()
        self.core.keep(self.core.step(joint))
        self.log.check(joint)
        return own


def failing(*on: int, error: Callable[[str], Exception] = RuntimeError) -> Callable[[StepPlan], None]:
    """Make a hook that fails at these launches, counted from 1."""
    launches = 0

    def fail(plan: StepPlan) -> None:
        nonlocal launches
        launches += 1
        if launches in on:
            raise error("injected")

    return fail


def test_a_rank_without_work_makes_the_exchanges_of_all_passes() -> None:
    rank = Rank()
    assert rank.step(JOINT) == NO_STEP
    assert rank.executor.num_padded == 4
    assert not rank.core.has_work


def test_a_rank_with_fewer_passes_than_others_makes_as_many() -> None:
    rank = Rank(**CUT)
    rank.core.send("r", range(1, 16), max_tokens=1)
    assert rank.step(JOINT) == StepShape(3, 6, 1)
    assert rank.executor.num_padded == 1
    assert rank.core.tokens("r") == answer_alone(range(1, 16), max_tokens=1)


@pytest.mark.parametrize("launch", [1, 2, 3])
def test_a_step_that_fails_half_way_makes_the_rest_of_its_exchanges(launch: int) -> None:
    """And no answer is half: the request fails, the next one gets all of its tokens."""
    rank = Rank(before_step=failing(launch), **CUT)
    rank.core.send("r", range(1, 16), max_tokens=1)
    rank.step(JOINT)
    failed = rank.core.events["r"][-1]
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.STEP_FAILED
    rank.core.send("s", range(1, 16), max_tokens=1)
    rank.step(JOINT)
    assert rank.core.tokens("s") == answer_alone(range(1, 16), max_tokens=1)


def test_a_row_that_fails_alone_ends_its_passes_and_the_rest_are_made_without_rows() -> None:
    rank = Rank(failing=lambda row: "injected", **CUT)
    rank.core.send("r", range(1, 16), max_tokens=1)
    rank.step(JOINT)
    assert rank.executor.num_padded == 3
    assert isinstance(rank.core.events["r"][-1], Failed)


def test_a_step_that_ran_out_of_memory_is_tried_again_in_a_step_of_its_own_shape() -> None:
    rank = Rank(before_step=failing(1, error=ExecutorOutOfMemoryError), max_prefill_tokens=8)
    rank.core.send("r", range(1, 9), max_tokens=2, ignore_eos=True)
    first = rank.step(StepShape(1, 20, 1))
    second = rank.step(StepShape(1, 20, 1))
    assert (first.tokens, second.tokens) == (8, 4)
    while rank.core.has_work:
        rank.step(StepShape(1, 20, 1))
    assert rank.core.tokens("r") == answer_alone(range(1, 9), max_tokens=2, ignore_eos=True)


def test_a_rank_that_only_reads_back_makes_the_exchanges_of_the_step_that_others_launch() -> None:
    """S4-R8: a step without tokens of its own returned early, and the other ranks waited for its exchanges for ever."""
    rank = Rank(overlap=True)
    rank.core.send("r", [1, 2, 3], max_tokens=1)
    assert rank.step(JOINT).forwards == 1
    assert not rank.core.tokens("r"), "its token is in flight"
    assert rank.step(JOINT) == NO_STEP
    assert rank.core.tokens("r") == answer_alone([1, 2, 3], max_tokens=1)


def test_a_chunk_in_the_middle_makes_the_draft_models_exchanges_of_ranks_that_draft() -> None:
    """S4-R8: a batch of middle chunks skipped the drafter, and the ranks that drafted waited for it for ever."""
    rank = Rank(max_prefill_tokens=4)
    rank.core.send("r", range(1, 16), max_tokens=1)
    assert rank.step(StepShape(1, 12, 1, 3, 5)) == StepShape(1, 4, 1)


def test_padding_that_fails_affects_no_request_and_leaves_no_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.core.send("r", [1, 2, 3], max_tokens=1)
    launch = rank.executor.launch

    def fail_after_its_exchanges(plan: StepPlan) -> None:
        launch(plan)
        if not plan.rows:
            raise ExecutorOutOfMemoryError("injected")

    monkeypatch.setattr(rank.executor, "launch", fail_after_its_exchanges)
    rank.step(JOINT)
    assert rank.core.tokens("r") == answer_alone([1, 2, 3], max_tokens=1)


def test_a_fatal_error_of_padding_leaves_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()

    def die(plan: StepPlan) -> None:
        raise ExecutorFatalError("injected")

    monkeypatch.setattr(rank.executor, "launch", die)
    rank.core.propose()
    with pytest.raises(ExecutorFatalError):
        rank.core.step(JOINT)


def test_a_step_that_the_ranks_did_not_agree_on_is_refused_before_it_is_launched() -> None:
    rank = Rank()
    rank.core.send("r", [1, 2, 3], max_tokens=1)
    rank.core.propose()
    with pytest.raises(AssertionError, match="the ranks agreed on"):
        rank.core.step(NO_STEP)
    assert not rank.log.made[0]
