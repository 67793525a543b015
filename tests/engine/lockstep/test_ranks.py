"""Contracts of the agreement between ranks: one result for all, no wait without end, one end for all.
Never needs an engine: ranks here are threads that exchange integers."""

from __future__ import annotations

from threading import Event

import pytest

from engine.lockstep.lockstep import Lockstep, UnevenRanksError
from engine.lockstep.shape import NO_STEP, StepShape, joint_shape
from engine.lockstep.threads import ThreadRanks, make_thread_ranks
from tests.support.rank_agreement import check_woken, each

DECODE, PREFILL = StepShape(1, 3), StepShape(1, 2, 1)


def test_a_joint_shape_covers_every_ranks_own_and_is_the_smallest_that_does() -> None:
    assert joint_shape([DECODE, PREFILL]) == StepShape(1, 3, 1)
    assert joint_shape([DECODE, PREFILL]).covers(DECODE)
    assert not DECODE.covers(PREFILL)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_maximum_of_each_number_in_every_round(size: int) -> None:
    ends = make_thread_ranks(size)

    def rounds(end: ThreadRanks) -> list[tuple[int, ...]]:
        return [end.reduce_max((end.rank * number, -end.rank)) for number in range(100)]

    expected = [((size - 1) * number, 0) for number in range(100)]
    assert each(*(lambda end=end: rounds(end) for end in ends)) == [expected] * size


def test_a_rank_is_awaited_from_the_first_call_of_another_on_until_its_own() -> None:
    check_woken(*make_thread_ranks(2))


def test_a_rank_that_is_awaited_before_it_can_be_woken_is_told_as_soon_as_it_can() -> None:
    first, second, third = make_thread_ranks(3)
    called, woken = Event(), Event()
    third.on_awaited(called.set)

    def join() -> tuple[int, ...]:
        assert called.wait(10)
        second.on_awaited(woken.set)
        assert woken.is_set()
        return second.reduce_max((2,))

    def join_too() -> tuple[int, ...]:
        assert woken.wait(10)
        return third.reduce_max((3,))

    assert each(lambda: first.reduce_max((1,)), join, join_too) == [(3,)] * 3


def test_whoever_waits_is_told_which_rank_left_and_why_and_no_later_round_begins() -> None:
    ends = make_thread_ranks(3)
    woken = Event()
    ends[2].on_awaited(woken.set)

    def leave() -> None:
        assert woken.wait(10), "somebody waits"
        ends[2].leave("out of memory")
        ends[2].leave("shut down")

    told = "The ranks have stopped together: rank 2 has left: out of memory."
    assert each(lambda: ends[0].reduce_max((1,)), lambda: ends[1].reduce_max((1,)), leave) == [told, told, None]
    assert ends[0].is_awaited, "so that it looks, and finds that all have stopped"
    assert each(lambda: ends[0].reduce_max((1,))) == [told]


def test_a_round_that_is_over_has_its_result_also_for_those_that_take_it_after_a_rank_has_left() -> None:
    """The rank that left makes the exchanges of that round, and would wait in them for a rank that does not."""
    first, second = make_thread_ranks(2)
    woken = Event()
    second.on_awaited(woken.set)

    def complete_and_leave() -> tuple[int, ...]:
        assert woken.wait(10)
        group = second._group
        with group._changed:  # the first cannot look before this rank has left
            result = second.reduce_max((2,))
            second.leave("shut down")
        return result

    assert each(lambda: first.reduce_max((1,)), complete_and_leave) == [(2,), (2,)]


def test_a_rank_that_does_not_arrive_ends_all_and_is_named() -> None:
    ends = make_thread_ranks(3, timeout_s=0.05)
    told = "The ranks have stopped together: ranks [1] did not arrive within 0.05 s."
    assert each(lambda: ends[0].reduce_max((1,)), lambda: ends[2].reduce_max((1,))) == [told, told]
    assert each(lambda: ends[1].reduce_max((1,))) == [told]


# --- what ranks tell each other ---------------------------------------------------------------------------------------


def steps_of(*ends: ThreadRanks, settings: tuple[object, ...] = ("same", "same", "same")) -> list[Lockstep]:
    return [Lockstep(end, setting) for end, setting in zip(ends, settings, strict=False)]


def test_a_rank_without_a_step_says_nothing_unless_it_is_awaited() -> None:
    first, second = steps_of(*make_thread_ranks(2, timeout_s=10))
    assert first.agree(NO_STEP) == NO_STEP, "and does not wait for the other"
    woken = Event()
    second.on_due(woken.set)

    def answer() -> StepShape:
        assert woken.wait(10)
        assert second.is_due
        return second.agree(NO_STEP)

    assert each(lambda: first.agree(PREFILL), answer) == [PREFILL, PREFILL]
    assert not first.is_due
    assert not second.is_due


def test_ranks_with_different_settings_are_refused_on_all_of_them() -> None:
    first, second = steps_of(*make_thread_ranks(2), settings=(("layers", 2), ("layers", 3)))
    assert each(lambda: first.agree(DECODE), lambda: second.agree(DECODE)) == [UnevenRanksError] * 2


def test_ranks_have_drained_when_the_last_one_says_so_and_nobody_asks_in_between() -> None:
    first, second = steps_of(*make_thread_ranks(2))
    first.drain()
    assert first.is_due
    assert each(lambda: first.agree(NO_STEP), lambda: second.agree(NO_STEP)) == [NO_STEP, NO_STEP]
    assert not first.is_due, "it has told the others"
    assert not first.have_all_drained
    second.drain()
    woken = Event()
    first.on_due(woken.set)

    def answer() -> StepShape:
        assert woken.wait(10)
        return first.agree(NO_STEP)

    assert each(answer, lambda: second.agree(NO_STEP)) == [NO_STEP, NO_STEP]
    assert first.have_all_drained
    assert second.have_all_drained
    assert not first.is_due
    assert not second.is_due
