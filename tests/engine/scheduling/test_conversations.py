"""Owns the contract of conversations: which turn a new one goes on from, and what it supersedes.
Never drops a block; test_by_value does."""

from __future__ import annotations

from engine.scheduling.conversations import MAX_BRANCHES, Conversations
from tests.engine.scheduling.kept_blocks import name, path_of

MUCH = 10**6


def test_a_turn_goes_on_from_the_one_that_it_shares_most_with() -> None:
    """A helper's turns come between those of its agent, under the same name."""
    talks = Conversations()
    agent, helper = path_of(20, 1, 1), path_of(4, 1, 2)
    assert talks.end_turn("s", agent, MUCH) == ()
    assert talks.end_turn("s", helper, MUCH) == (), "short, and shares little of the agent's"
    longer = [*helper, *path_of(6, 1, 2)[4:]]
    assert list(talks.end_turn("s", longer, MUCH)) == []
    cut = [*agent[:15], *path_of(22, 1, 1, *[0] * 13, 9)[15:]]
    assert list(talks.end_turn("s", cut, MUCH)) == agent[15:]


def test_a_turn_that_lost_its_thoughts_supersedes_all_behind_the_first_of_them() -> None:
    talks = Conversations()
    before, after = path_of(20, 1, 1), path_of(18, 1, 2)
    talks.end_turn("s", before, MUCH)
    assert list(talks.end_turn("s", after, MUCH)) == before[1:]


def test_a_turn_that_shares_as_much_with_several_goes_on_from_none_of_them() -> None:
    """Regression: applications name all their conversations alike, and each new one, which shared only the system
    prompt with the others, superseded the newest of them."""
    talks = Conversations()
    first, second = path_of(12, 1, 1), path_of(5, 1, 2)
    talks.end_turn("app", first, MUCH)
    assert talks.end_turn("app", second, MUCH) == (), "too short to go on from the first"
    assert talks.end_turn("app", path_of(20, 1, 3), MUCH) == (), "it may go on from either"
    assert list(talks.end_turn("app", path_of(14, 1, 1), MUCH)) == [], "the first goes on, and lost nothing"
    assert list(talks.end_turn("app", [*path_of(4, 1, 2), *path_of(9, 1, 2, 0, 0, 7)[4:]], MUCH)) == second[4:]


def test_a_session_has_so_many_branches_and_no_more() -> None:
    talks = Conversations()
    for number in range(MAX_BRANCHES + 1):
        talks.end_turn("s", path_of(2, number), MUCH)
    assert list(talks.end_turn("s", path_of(1, 0), MUCH)) == [], "the first one was forgotten"
    assert list(talks.end_turn("s", path_of(1, 2), MUCH)) == [path_of(2, 2)[1]]


def test_requests_without_a_full_block_take_no_branch_of_their_session() -> None:
    talks = Conversations()
    before = path_of(4, 1)
    talks.end_turn("s", before, MUCH)
    for _ in range(MAX_BRANCHES):
        assert talks.end_turn("s", [], MUCH) == ()
    assert list(talks.end_turn("s", path_of(3, 1), MUCH)) == before[3:]


def test_a_chain_that_its_owner_extends_later_is_as_it_was() -> None:
    talks = Conversations()
    chain = path_of(3, 1)
    talks.end_turn("s", chain, MUCH)
    chain += [name(9)]
    assert list(talks.end_turn("s", path_of(2, 1), MUCH)) == [path_of(3, 1)[2]]


def test_the_oldest_sessions_are_forgotten_when_chains_get_too_long_together() -> None:
    talks = Conversations()
    for number in range(100):
        talks.end_turn(f"session {number}", path_of(10, number), 250)
    assert len(talks) == 25
    assert (talks.num_turns("session 74"), talks.num_turns("session 75")) == (0, 1)


def test_a_long_session_does_not_make_others_forgotten() -> None:
    talks = Conversations()
    talks.end_turn("other", path_of(10, 1), 250)
    for number in range(100):
        talks.end_turn("long", path_of(10, 2, number), 250)
    assert talks.num_turns("other") == 1
