"""How much prefill a step may carry beside its decode rows, by time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.step_prediction import Prediction
from engine.scheduling.step_time import StepCosts, StepWork, chunk_work, decode_work
from engine.scheduling.time_budget import LEAST_SHARE, MARGIN, TimeBudget, step_limit
from engine.step import PaddedSizes

COSTS = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7)
SECONDS = st.floats(1e-4, 10.0)


@given(SECONDS, SECONDS, st.floats(0.0, 1e6))
def test_prefill_always_gets_some_time_and_never_more_than_decodes_have_beyond_the_target(
    target_s: float, decode_s: float, lateness: float
) -> None:
    limit = step_limit(target_s, decode_s, lateness)
    assert limit >= target_s
    assert limit > decode_s
    assert limit <= max(target_s, 2 * decode_s) + 1e-12


@given(SECONDS, st.floats(0.0, 1.0))
def test_while_decodes_alone_meet_the_target_a_step_exceeds_it_by_a_tenth_at_most(
    target_s: float, share: float
) -> None:
    assert step_limit(target_s, share * target_s) <= (1 + LEAST_SHARE) * target_s * (1 + 1e-12)


def test_the_later_a_prompt_is_the_more_time_it_gets_up_to_half_of_the_target() -> None:
    limits = [step_limit(0.1, 0.095, lateness) for lateness in (0.0, 1.0, 2.0, 4.0, 5.0, 50.0)]
    assert limits == pytest.approx([0.105, 0.105, 0.115, 0.135, 0.145, 0.145])
    assert step_limit(0.1, 0.04, 50.0) == 0.1, "where streams leave half of it, they lose nothing"


def test_a_lost_target_costs_prompts_no_more_than_streams() -> None:
    """A target of 1 ms on a machine whose decode rows take 100 ms: prompts get as much time as streams do."""
    assert step_limit(0.001, 0.1) == pytest.approx(0.2, rel=0.01)


def test_chunks_share_the_time_of_their_step() -> None:
    decodes = decode_work(4, 100)
    budget = TimeBudget(Prediction(COSTS), 0.1, decodes)
    first = budget.most(0, 40)
    assert first == 40
    budget.take(0, first, last=True)
    second = budget.most(500, 4000)
    work = decodes.plus(chunk_work(0, 40, last=True)).plus(chunk_work(500, second, last=True))
    assert COSTS.seconds(work) <= 0.1 < COSTS.seconds(work.plus(StepWork(4)))


def test_a_step_that_takes_a_prompt_at_all_takes_what_it_is_padded_to() -> None:
    costs = replace(COSTS, sizes=PaddedSizes((4, 8), (64, 128)))
    budget = TimeBudget(Prediction(costs), 0.011, decode_work(4, 100))
    assert (budget.most(0, 4000), budget.least) == (0, 60), "a step of 64 tokens takes longer than the target allows"
    budget.take(0, 60, last=False)
    assert budget.least == 64
    assert TimeBudget(Prediction(COSTS), 0.011, decode_work(4, 100)).least == 1


def test_a_prediction_that_varies_leaves_a_margin() -> None:
    decodes = decode_work(4, 100)
    steady, varied = (TimeBudget(Prediction(COSTS, deviation=off), 0.1, decodes) for off in (0.0, 0.1))
    assert varied.most(0, 4000) < steady.most(0, 4000)
    kept = 1 + 0.1 * MARGIN
    assert varied.most(0, 4000) == TimeBudget(Prediction(COSTS), 0.1 / kept, decodes).most(0, 4000)
