"""The prediction of step times: what it learns from steps, and how far one step may move it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.step_prediction import MEMORY_STEPS, MOST_SCALE, Prediction, StepTimeModel
from engine.scheduling.step_time import StepCosts, StepWork, chunk_work, decode_work
from tests.engine.scheduling.test_step_time import COSTS, WORKS


def taught(draw: random.Random, *, times: float = 1.0, extra_s: float = 0.0, noise: float = 1.0) -> StepTimeModel:
    """Return a model that has seen a thousand steps of a machine that differs from the costs."""
    model = StepTimeModel(COSTS, deviation=0.5)
    for _ in range(5 * MEMORY_STEPS):
        rows, chunk = draw.randint(1, 16), draw.choice((0, 0, 0, 40, 400))
        work = decode_work(rows, 100).plus(chunk_work(0, chunk, last=False))
        model.observe(work, (times * COSTS.seconds(work) + extra_s) * draw.choice((noise, 1 / noise)))
    return model


def test_the_model_follows_a_machine_that_became_slower() -> None:
    model = taught(random.Random(5), times=1.7)
    for work in (StepWork(1), StepWork(36), StepWork(500, 10, 5000, 5000)):
        assert model.now.seconds(work) == pytest.approx(1.7 * COSTS.seconds(work), rel=0.03)


def test_what_the_host_adds_to_every_step_is_told_from_a_slower_machine() -> None:
    """Two milliseconds of Python are a tenth of a short step and nothing of a long one."""
    model = taught(random.Random(6), extra_s=0.004)
    assert model.now.extra_s == pytest.approx(0.004, rel=0.3)
    for work in (StepWork(1), StepWork(36), StepWork(500, 10, 5000, 5000)):
        assert model.now.seconds(work) == pytest.approx(COSTS.seconds(work) + 0.004, rel=0.03)


def shown(model: StepTimeModel, draw: random.Random, steps: int, *, times: float) -> None:
    """Show the model steps of a machine that takes `times` as long as the costs say, give or take a twentieth."""
    for _ in range(steps):
        work = decode_work(draw.randint(1, 16), 100).plus(chunk_work(0, draw.choice((0, 0, 40, 400)), last=False))
        model.observe(work, times * COSTS.seconds(work) * draw.uniform(0.95, 1.05))


@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_a_neighbour_that_came_or_went_is_followed_within_dozens_of_steps(times: float) -> None:
    """With the same memory as for small errors it took 400 steps, in which prompts got a third of their time."""
    model, draw = StepTimeModel(COSTS, deviation=0.03), random.Random(8)
    shown(model, draw, 1000, times=1.0)
    for now in (times, 1.0):
        shown(model, draw, 80, times=now)
        for work in (StepWork(1), StepWork(36), StepWork(500, 10, 5000, 5000)):
            assert model.now.seconds(work) == pytest.approx(now * COSTS.seconds(work), rel=0.15)
    shown(model, draw, 300, times=1.0)
    assert model.now.deviation < 0.06


def test_steps_that_were_stopped_now_and_then_are_no_slower_machine() -> None:
    model, draw = StepTimeModel(COSTS, deviation=0.03), random.Random(9)
    for _ in range(20):
        shown(model, draw, 40, times=1.0)
        model.observe(StepWork(8), 60.0)
        assert model.now.seconds(StepWork(64)) == pytest.approx(COSTS.seconds(StepWork(64)), rel=0.1)


def test_one_step_of_a_minute_moves_it_by_a_tenth_at_most() -> None:
    model = StepTimeModel(COSTS, deviation=0.02)
    before = model.now.seconds(StepWork(8))
    model.observe(StepWork(8), 60.0)
    assert before < model.now.seconds(StepWork(8)) < 1.2 * before


@given(st.lists(st.tuples(WORKS, st.floats(0.0, 1e6))), st.integers(1, 40), st.floats(0.5, 2.0))
def test_the_correction_never_leaves_its_bounds(seen: list[tuple[StepWork, float]], times: int, scale: float) -> None:
    model = StepTimeModel(COSTS, deviation=0.02, scale=scale)
    for work, seconds in seen * times:
        model.observe(work, seconds)
    assert 1 / MOST_SCALE <= model.now.scale <= MOST_SCALE
    assert 0 <= model.now.extra_s <= MOST_SCALE * COSTS.curve_s[0]
    assert 0 <= model.now.deviation <= 1


def test_the_deviation_is_that_of_the_steps() -> None:
    assert taught(random.Random(7), noise=0.9).now.deviation == pytest.approx(0.105, abs=0.02)


def test_a_step_without_a_prediction_or_without_a_time_teaches_nothing() -> None:
    free = StepTimeModel(StepCosts((1, 2), (0.0, 0.0)), deviation=0.1)
    model = StepTimeModel(COSTS, deviation=0.1)
    before = free.now, model.now
    free.observe(StepWork(1), 1.0)
    model.observe(StepWork(1), 0.0)
    assert (free.now, model.now) == before


def test_the_tokens_that_fit_are_those_of_the_corrected_time() -> None:
    now, beside = Prediction(COSTS, scale=1.5, extra_s=0.003), decode_work(4, 100)
    left_s = now.fitted(0.1) - COSTS.rest_s(beside) - COSTS.sample_s
    count = COSTS.tokens_within(left_s, beside.tokens, 64, 500)
    assert now.seconds(beside.plus(chunk_work(64, count, last=True))) <= 0.1
    assert now.seconds(beside.plus(chunk_work(64, count + 1, last=True))) > 0.1


@given(st.integers(0, 2000), st.integers(0, 3000), st.integers(1, 512))
def test_a_prompts_time_is_that_of_its_steps(start: int, count: int, step_tokens: int) -> None:
    now, end, expected, at = Prediction(COSTS, scale=0.5, extra_s=0.001), start + count, 0.0, start
    while at < end:
        size = min(step_tokens, end - at)
        expected += now.seconds(chunk_work(at, size, last=at + size == end))
        at += size
    assert now.prefill_seconds(start, end, step_tokens) == pytest.approx(expected)
