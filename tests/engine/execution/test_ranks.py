"""Contracts of a step that several ranks make: what fails on one ends all, with one reason, or is that rank's alone.
Never starts a rank: who gives up is noted."""

from __future__ import annotations

import pytest

from engine.execution.ranks import all_or_none
from engine.step import ExecutorFatalError, RanksEndedError
from kernels.collectives.group import RankLostError


class Noted:
    """A group that keeps why this rank has given up."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)


def fail(group: Noted, error: Exception, *, alone: bool = False) -> None:
    words = {"lost": "Others are lost", "failed": "This one failed"}
    with all_or_none(group, RanksEndedError, **words, is_mine_alone=lambda: alone):
        raise error


@pytest.mark.parametrize(
    ("error", "told", "given_up"),
    [
        (RankLostError("Rank 2 has died."), "Others are lost: Rank 2 has died.", []),
        (MemoryError("no room"), "This one failed: no room", ["MemoryError: no room"]),
        (ExecutorFatalError("a fault"), "This one failed: a fault", ["ExecutorFatalError: a fault"]),
        (RanksEndedError("known already"), "known already", ["known already"]),
    ],
    ids=["lost", "failed", "fatal", "fatal of its own"],
)
def test_a_failure_ends_all_ranks_with_its_reason_unless_another_rank_has_ended_them(
    error: Exception, told: str, given_up: list[str]
) -> None:
    group = Noted()
    with pytest.raises(RanksEndedError) as caught:
        fail(group, error)
    assert str(caught.value) == told
    assert group.reasons == given_up


def test_a_failure_of_which_no_other_rank_knows_is_this_rank_s_alone_and_a_lost_rank_never_is() -> None:
    group = Noted()
    with pytest.raises(ValueError, match="a wrong plan"):
        fail(group, ValueError("a wrong plan"), alone=True)
    assert group.reasons == []
    with pytest.raises(RanksEndedError, match="Others are lost: Rank 1"):
        fail(group, RankLostError("Rank 1 has left."), alone=True)


def test_a_step_that_succeeds_tells_nobody() -> None:
    group = Noted()
    with all_or_none(group):
        pass
    assert group.reasons == []
