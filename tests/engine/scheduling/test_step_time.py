"""The step time model: what it predicts, what a fit finds, and how far one step may move it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.multimodal_inputs import EncodeJob
from engine.scheduling.step_time import (
    Measured,
    StepCosts,
    StepWork,
    chunk_work,
    decode_work,
    fit_costs,
    knots_up_to,
    read_costs,
    relative_errors,
    work_of,
)
from engine.step import PaddedSizes, RowKind, RowSampling, ScheduledRequest, StepPlan

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
COSTS = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7, 0.001)
PADDED = replace(COSTS, sizes=PaddedSizes(decode=(1, 2, 4, 8, 16, 24), mixed=(64, 128, 320)))
"""As on a GPU, where steps of up to 24 decode rows, or of up to 320 tokens with prompts, are captured."""
WORKS = st.builds(
    StepWork,
    st.integers(1, 2000),
    st.integers(0, 200),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 500),
    st.integers(0, 2000),
)


def row(kind: RowKind, start: int, count: int, *, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest("r", kind, start, (1,) * count, (0,), GREEDY if samples else None)


def measured(costs: StepCosts, draw: random.Random, count: int, noise: float = 0.0) -> list[Measured]:
    """Draw steps of up to 512 tokens, some of decode rows alone, which take what `costs` say but for `noise`."""
    steps = []
    for _ in range(count):
        amounts = draw.randint(0, 32), draw.randint(0, 10**5), draw.randint(0, 10**5)
        tokens = draw.choice((draw.randint(1, 24), draw.randint(1, 512)))
        work = StepWork(tokens, *amounts, mixed=draw.choice((0, tokens)) if tokens <= 24 else tokens)
        steps.append(Measured(work, costs.seconds(work) * draw.uniform(1 - noise, 1 + noise)))
    return [Measured(decode_work(1, 10), costs.seconds(decode_work(1, 10))), *steps]


# --- what a step's work is --------------------------------------------------------------------------------------------


def test_the_work_of_a_step_is_that_of_its_rows() -> None:
    """A decode row with drafts chooses a token after each of its tokens; of a prompt, only the last chunk does."""
    plan = StepPlan(
        0,
        (
            row(RowKind.DECODE, 100, 1),
            row(RowKind.DECODE, 200, 3),
            row(RowKind.MIDDLE, 0, 40, samples=False),
            row(RowKind.LAST, 16, 4),
        ),
        encodes=(EncodeJob(b"", (1, 4, 6), b""), EncodeJob(b"", (1, 2, 2), b"")),
    )
    attended = 101 + (201 + 202 + 203) + 40 * 41 // 2 + (17 + 18 + 19 + 20)
    assert work_of(plan) == StepWork(48, 5, 101 + 203 + 40 + 20, attended, 28, mixed=2 + 40 + 4)


@given(st.integers(1, 40), st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 500), st.booleans())
def test_the_work_of_parts_adds_up_to_that_of_the_step(
    rows: int, context: int, start: int, count: int, last: bool
) -> None:
    kind = RowKind.LAST if last else RowKind.MIDDLE
    plan = StepPlan(0, (*[row(RowKind.DECODE, context, 1)] * rows, row(kind, start, count, samples=last)))
    assert decode_work(rows, context).plus(chunk_work(start, count, last=last)) == work_of(plan)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_a_step_takes_its_tokens_and_what_else_it_does() -> None:
    assert COSTS.seconds(StepWork(36)) == pytest.approx(0.021)
    assert COSTS.seconds(StepWork(36, 10, 1000, 500, 3)) == pytest.approx(0.021 + 0.002 + 0.001 + 0.0002 + 0.003)


def test_beyond_its_last_knot_the_curve_goes_on_as_it_came() -> None:
    assert COSTS.seconds(StepWork(960)) == pytest.approx(0.2 + 0.17)


def test_a_step_takes_as_long_as_one_of_the_size_that_it_is_padded_to() -> None:
    for count in (3, 4):
        assert PADDED.seconds(StepWork(count)) == COSTS.seconds(StepWork(4))
    for mixed in (1, 2):
        assert PADDED.seconds(StepWork(4, mixed=mixed)) == COSTS.seconds(StepWork(64)), "a chunk, or a draft"
    assert PADDED.seconds(StepWork(25)) == COSTS.seconds(StepWork(25)), "larger steps are not padded"
    assert PADDED.seconds(StepWork(321, mixed=300)) == COSTS.seconds(StepWork(321))
    assert PADDED.seconds(StepWork(0)) == COSTS.seconds(StepWork(0))


def test_a_chunk_fills_what_its_step_is_padded_to() -> None:
    """Its first token takes as long as all of them."""
    assert PADDED.padding_beside(4) == 60
    assert PADDED.padding_beside(64) == 64
    assert PADDED.padding_beside(320) == COSTS.padding_beside(4) == 1


@pytest.mark.parametrize("costs", [COSTS, PADDED])
@given(work=WORKS, more=WORKS)
def test_more_work_never_takes_less_time(costs: StepCosts, work: StepWork, more: StepWork) -> None:
    assert costs.seconds(work.plus(more)) >= costs.seconds(work)


@pytest.mark.parametrize("costs", [COSTS, PADDED])
@given(seconds=st.floats(0.001, 2.0), rows=st.integers(0, 40), start=st.integers(0, 8000), most=st.integers(1, 3000))
def test_the_tokens_that_fit_are_as_many_as_the_prediction_allows(
    costs: StepCosts, seconds: float, rows: int, start: int, most: int
) -> None:
    beside = decode_work(rows, 500)
    count = costs.tokens_within(seconds - costs.rest_s(beside) - costs.sample_s, beside.tokens, start, most)
    assert 0 <= count <= most
    assert not count or costs.seconds(beside.plus(chunk_work(start, count, last=True))) <= seconds * (1 + 1e-12)
    if count < most:
        assert costs.seconds(beside.plus(chunk_work(start, count + 1, last=True))) > seconds * (1 - 1e-12)


def test_where_tokens_cost_nothing_all_of_them_fit() -> None:
    assert StepCosts((1, 2), (0.0, 0.0)).tokens_within(1.0, 0, 0, 10**6) == 10**6


# --- the fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [COSTS, PADDED])
def test_a_fit_finds_the_costs_that_made_the_measurements(costs: StepCosts) -> None:
    found = fit_costs(measured(costs, random.Random(1), 400), (1, 8, 64, 512), costs.sizes)
    assert max(map(abs, relative_errors(found, measured(costs, random.Random(2), 100)))) < 0.001


def test_a_fits_knots_are_sizes_that_occur() -> None:
    """What no step is padded to, no measurement tells."""
    found = fit_costs(measured(PADDED, random.Random(1), 400), (1, 8, 16, 32, 48, 100, 512), PADDED.sizes)
    assert found.knots[:5] == (1, 8, 16, 64, 128)
    assert found.knots[5] > 320


def test_a_fit_finds_how_many_tokens_are_multiplied_at_a_time() -> None:
    """On a CPU nine tokens take as long as sixteen."""
    tiled = replace(COSTS, tile=8)
    assert tiled.seconds(StepWork(9)) == tiled.seconds(StepWork(16)) > tiled.seconds(StepWork(8))
    found = fit_costs(measured(tiled, random.Random(7), 300, noise=0.02), (1, 8, 64, 512))
    assert found.tile == 8
    assert max(map(abs, relative_errors(found, measured(tiled, random.Random(8), 100)))) < 0.05


def test_noise_of_a_tenth_moves_a_prediction_by_little() -> None:
    found = fit_costs(measured(COSTS, random.Random(3), 600, noise=0.1), (1, 8, 64, 512))
    errors = sorted(map(abs, relative_errors(found, measured(COSTS, random.Random(4), 200))))
    assert errors[len(errors) // 2] < 0.02
    assert errors[-1] < 0.15


@given(st.integers(0, 10**6), st.lists(st.floats(0.001, 10.0), min_size=40, max_size=40))
def test_whatever_was_measured_no_factor_is_negative(seed: int, seconds: list[float]) -> None:
    """Nor does the curve fall: a plan that trusts it could otherwise grow for ever."""
    steps = measured(COSTS, random.Random(seed), 39)
    found = fit_costs([Measured(step.work, took) for step, took in zip(steps, seconds, strict=True)], (1, 64))
    assert list(found.curve_s) == sorted(found.curve_s)
    assert min(found.curve_s[0], found.sample_s, found.key_s, found.attended_s) >= 0


def test_work_that_no_step_had_costs_nothing() -> None:
    steps = [Measured(StepWork(count), 0.01 + 0.001 * count) for count in (1, 8, 64)]
    assert fit_costs(steps, (1, 8, 64)).encoded_s == 0


@pytest.mark.parametrize(
    ("steps", "knots", "error"),
    [
        ([], (1, 8), "0 steps of up to 0 tokens are too few"),
        ([Measured(StepWork(1), 0.1)] * 9, (1, 8), "9 steps of up to 1 tokens are too few"),
        (
            [Measured(StepWork(count), 0.1) for count in (1, 500)],
            (1, 8),
            "2 steps of up to 500 tokens are too few for a curve with 3",
        ),
        ([Measured(StepWork(1), 0.1), Measured(StepWork(8), 0.0)], (1, 8), "a step took no time"),
    ],
)
def test_too_few_measurements_are_refused(steps: list[Measured], knots: tuple[int, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        fit_costs(steps, knots)


@pytest.mark.parametrize("most", [9, 16, 17, 512, 1000, 8192])
def test_knots_rise_up_to_the_largest_step(most: int) -> None:
    knots = knots_up_to(most)
    assert list(knots) == sorted(set(knots))
    assert (knots[0], knots[-1]) == (1, most)


def test_costs_survive_a_file() -> None:
    for costs in (COSTS, PADDED):
        assert read_costs(json.loads(json.dumps(costs.document()))) == costs


def test_costs_of_a_file_that_names_no_sizes_are_of_steps_that_are_not_padded() -> None:
    document = COSTS.document()
    del document["sizes"]
    assert read_costs(document) == COSTS


@pytest.mark.parametrize(
    "change",
    [
        {"knots": [1]},
        {"knots": [8, 1, 64, 512]},
        {"knots": [1, 8, 64, math.inf]},
        {"curve_s": [0.1, 0.05, 0.2, 0.3]},
        {"curve_s": None},
        {"sample_s": -1.0},
        {"sample_s": "x"},
        {"sample_s": math.nan},
        {"tile": 0},
        {"sizes": [[8, 4], []]},
        {"sizes": [[0, 4], []]},
        {"sizes": [[], [], []]},
        {"sizes": 3},
    ],
)
def test_a_file_with_something_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="these are no step costs"):
        read_costs({**COSTS.document(), **change})
