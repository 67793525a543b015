"""Contracts of how many tokens are drafted: as many as are expected to pay, without slowing one stream down for
another.
All is arithmetic: the chances are taken to be exact, and steps to take as long as the curve says."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.step_time import StepCosts
from engine.speculation import draft_budget
from engine.speculation.draft_budget import (
    GAP,
    KEPT,
    MARGIN,
    START,
    AssumedCosts,
    Beside,
    Costs,
    MeasuredCosts,
    Wish,
    choose_lengths,
    keep_aside,
    may_pay,
    pace_aside,
)
from engine.step import PaddedSizes

CHANCES = st.integers(0, 100).map(lambda percent: percent / 100)
WISHES = st.lists(st.builds(Wish, CHANCES, st.integers(1, 8)), min_size=1, max_size=5)
COSTS = st.sampled_from([AssumedCosts(1), AssumedCosts(4), AssumedCosts(8), AssumedCosts(128)])


def gained(wish: Wish, length: int) -> float:
    """Return the number of tokens that a draft is expected to gain."""
    return sum(wish.chance**i for i in range(1, length + 1))


def pace(wishes: list[Wish], lengths: list[int], beside: Beside, costs: Costs) -> float:
    """Return the tokens per time of a step of one token."""
    tokens = beside.num_rows + beside.num_forced
    expected = tokens + sum(map(gained, wishes, lengths))
    return expected / (costs.duration(tokens + sum(lengths)) + START * any(lengths))


@given(wishes=WISHES, bare=st.integers(0, 12), forced=st.integers(0, 6), room=st.integers(0, 30), costs=COSTS)
def test_drafts_are_expected_to_pay_and_every_row_keeps_its_pace(
    wishes: list[Wish], bare: int, forced: int, room: int, costs: Costs
) -> None:
    beside = Beside(len(wishes) + bare, forced, bare)
    lengths = choose_lengths(wishes, beside, room, costs)
    assert all(0 <= length <= wish.most for length, wish in zip(lengths, wishes, strict=True))
    assert sum(lengths) <= room
    none = [0] * len(wishes)
    assert pace(wishes, lengths, beside, costs) >= pace(wishes, none, beside, costs) * (1 - 1e-9)
    tokens = beside.num_rows + forced
    slower = (costs.duration(tokens + sum(lengths)) + START * any(lengths)) / costs.duration(tokens)
    gains = [1 + gained(*row) for row in zip(wishes, lengths, strict=True)] + [1.0] * bare
    assert not any(lengths) or min(gains) / slower >= KEPT - 1e-9


@given(chance=st.floats(0.05, 0.99), most=st.integers(1, 8), costs=COSTS)
def test_alone_a_row_is_drafted_almost_as_far_as_is_best(chance: float, most: int, costs: Costs) -> None:
    wish, beside = Wish(chance, most), Beside(1, 0, 0)
    (length,) = choose_lengths([wish], beside, 100, costs)
    best = max(pace([wish], [length], beside, costs) for length in range(most + 1))
    assert pace([wish], [length], beside, costs) >= 0.85 * best


@given(wishes=WISHES, forced=st.integers(0, 6))
def test_the_likelier_row_is_never_drafted_less_far(wishes: list[Wish], forced: int) -> None:
    wishes = [wish._replace(most=8) for wish in wishes]
    lengths = choose_lengths(wishes, Beside(len(wishes), forced, 0), 100, AssumedCosts(8))
    for (one, first), (other, second) in product(zip(wishes, lengths, strict=True), repeat=2):
        assert one.chance <= other.chance or first >= second


@pytest.mark.parametrize("chance", [0.0, 0.01])
def test_what_is_hardly_ever_right_is_not_drafted(chance: float) -> None:
    assert choose_lengths([Wish(chance, 8)], Beside(1, 0, 0), 100, AssumedCosts(8)) == [0]


def test_what_is_always_right_is_drafted_far_for_a_stream_alone_and_not_at_all_for_many() -> None:
    costs = AssumedCosts(8)
    assert choose_lengths([Wish(0.99, 8)], Beside(1, 0, 0), 100, costs) == [7], "as far as is cheap"
    many = next(rows for rows in range(1, 100) if not may_pay(rows, costs))
    assert 4 < many < 16
    for rows in range(many, 200):
        assert not may_pay(rows, costs)
        assert not any(choose_lengths([Wish(1.0, 8)] * rows, Beside(rows, 0, 0), 1000, costs))


def test_a_stream_without_drafts_is_not_slowed_down_for_one_that_has_many() -> None:
    costs, wish = AssumedCosts(8), Wish(0.99, 8)
    alone, beside = (choose_lengths([wish], Beside(1 + bare, 0, bare), 100, costs) for bare in (0, 1))
    assert 0 < beside[0] < alone[0]
    assert costs.duration(2 + beside[0]) + START <= costs.duration(2) / KEPT


@given(st.integers(1, 256), COSTS)
def test_a_step_takes_longer_with_each_token_and_ever_more_so(tokens: int, costs: Costs) -> None:
    first, second, third = (costs.duration(tokens + more) for more in range(3))
    assert first < second < third
    assert third - second >= second - first - 1e-12
    assert costs.duration(1) == 1


def test_the_curve_names_what_it_was_fitted_to() -> None:
    """Regression: it once named figures that its page did not have."""
    results = Path(__file__).parents[3] / "loadtest" / "results"
    code = Path(draft_budget.__file__).read_text(encoding="utf-8")
    told = " ".join(code.partition("CHEAP, DEAR")[2].partition("START =")[0].split())
    rows = {}
    for name in ("engine_step_vectors", "engine_step"):
        cells = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["cells"]
        native = [cell for cell in cells if (cell["step"], cell["kernels"]) == ("decode", "native")]
        rows[name] = {cell["size"]: cell["ms_p50"] for cell in native}
    fitted, matrix = rows["engine_step_vectors"], rows["engine_step"]
    assert re.findall(r"(\d+\.\d)(?: ms)? for (\d+)", told) == [(f"{ms:.1f}", str(size)) for size, ms in fitted.items()]
    assert f"32 rows take {matrix[32] / matrix[1]:.1f} times" in told
    assert f"this curve has {AssumedCosts(8).duration(32):.1f}" in told


STEPS = StepCosts(
    (1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7, tile=8, sizes=PaddedSizes((8,), (64,))
)


def test_measured_costs_are_those_of_the_steps_without_their_tiles_and_padding() -> None:
    costs = MeasuredCosts.of(STEPS)
    assert costs.duration(1) == 1
    assert costs.duration(8) == pytest.approx((0.012 + 8 * 0.0002) / 0.0102)
    assert costs.duration(2) < costs.duration(3) < costs.duration(8), "a part of a tile is a part"


def test_a_machine_on_which_tokens_cost_little_drafts_more() -> None:
    wish, beside = Wish(0.8, 8), Beside(4, 0, 0)
    cheap, dear = (
        choose_lengths([wish] * 4, beside, 100, MeasuredCosts.of(StepCosts((1, 512), (0.010, y)))) for y in (0.02, 5.0)
    )
    assert sum(dear) == 0 < sum(cheap)


def test_steps_that_take_no_time_can_be_compared() -> None:
    assert MeasuredCosts.of(StepCosts((1, 2), (0.0, 0.0))).duration(8) == 1.0


# --- beside overlapped steps -----------------------------------------------------------------------------------------


@given(chance=st.floats(0.01, 0.99), length=st.integers(1, 8))
def test_what_a_draft_wins_is_counted_for_each_step_that_its_row_misses(chance: float, length: int) -> None:
    """A run of drafts ends with the first that is not right as a whole. The row misses one step for each draft, and one
    before the first."""
    gain, whole = gained(Wish(chance, length), length), chance**length
    drafts = 1 / (1 - whole)  # the mean of a geometric distribution
    assert pace_aside(Wish(chance, length), length, in_flight=False) == pytest.approx(gain)
    won = chance * drafts * gain / (drafts + 1)
    assert pace_aside(Wish(chance, length), length, in_flight=True) == pytest.approx(won)


def test_beside_rows_without_drafts_each_draft_pays_for_itself() -> None:
    lengths, paces = [4, 4, 4], [3.2, MARGIN, 1.2]
    assert keep_aside(lengths, paces, Beside(4, 0, num_bare=1)) == [4, 4, 0]


def test_if_all_rows_draft_they_pay_together_for_reading_each_step_first() -> None:
    lengths = [4, 4]
    enough = MARGIN * GAP
    assert keep_aside(lengths, [enough, enough], Beside(2, 0, 0)) == [4, 4]
    assert keep_aside(lengths, [enough, 0.9 * enough], Beside(2, 0, 0)) == [0, 0]
    assert keep_aside([4, 0], [3.0, 0.0], Beside(2, 0, 0)) == [4, 0], "the other row overlaps"
