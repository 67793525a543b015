"""Contracts of the agreement over a group: one result for all, a word that wakes who sleeps, one end for all.
Never starts a process: ranks here are threads, whose words go straight to each other."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from engine.parallel.group_ranks import GroupRanks
from engine.parallel.rank_messages import Left, Opened
from tests.support.rank_agreement import check_woken, each
from tests.support.rank_threads import make_thread_groups


def make_ranks(size: int) -> list[GroupRanks]:
    ranks: list[GroupRanks] = []

    def tell_from(rank: int) -> Callable[[Opened | Left], None]:
        def tell(message: Opened | Left) -> None:
            for other in ranks:
                if other.rank != rank:
                    other.opened(message.round) if isinstance(message, Opened) else other.lose(message.reason)

        return tell

    ranks += [GroupRanks(group, tell_from(group.rank)) for group in make_thread_groups(size)]
    return ranks


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_maximum_of_each_number_in_every_round(size: int) -> None:
    ranks = make_ranks(size)

    def rounds(end: GroupRanks) -> list[tuple[int, ...]]:
        return [end.reduce_max((end.rank * number, -end.rank, 1 << 60)) for number in range(50)]

    expected = [((size - 1) * number, 0, 1 << 60) for number in range(50)]
    assert each(*(lambda end=end: rounds(end) for end in ranks)) == [expected] * size
    assert not any(end.is_awaited for end in ranks), "words of rounds that are over change nothing"


def test_a_rank_is_woken_by_another_s_round_and_awaited_until_its_own_part() -> None:
    check_woken(*make_ranks(2))


def test_a_rank_that_leaves_wakes_the_others_and_is_named_with_its_first_reason() -> None:
    first, second, third = make_ranks(3)
    woken, third_woken = Event(), Event()
    second.on_awaited(woken.set)
    third.on_awaited(third_woken.set)

    def leave() -> None:
        assert woken.wait(10), "somebody waits"
        second.leave("out of memory")
        second.leave("shut down")

    told = "The ranks have stopped together: rank 1 has left: out of memory."
    assert each(lambda: first.reduce_max((1,)), leave) == [told, None]
    assert third_woken.is_set()
    assert third.is_awaited, "so that it looks, and finds that all have stopped"
    assert each(lambda: third.reduce_max((1,))) == [told]


def test_a_rank_whose_process_has_died_wakes_one_that_sleeps() -> None:
    first, _ = make_ranks(2)
    woken = Event()
    first.on_awaited(woken.set)
    first.lose("Rank 1 has died")
    assert woken.is_set()
    assert each(lambda: first.reduce_max((1,))) == ["The ranks have stopped together: Rank 1 has died."]


def test_a_word_before_there_is_anybody_to_wake_is_not_lost() -> None:
    first, _ = make_ranks(2)
    first.opened(1)
    woken = Event()
    first.on_awaited(woken.set)
    assert woken.is_set()
