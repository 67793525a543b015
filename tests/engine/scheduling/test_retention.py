"""Owns the contract of retention, which every policy keeps, the one by age, and the names of sessions.
Never tests what blocks are worth; test_by_value does."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify

import pytest
from hypothesis import given

from engine.scheduling import retention
from engine.scheduling.by_value import ByValue
from engine.scheduling.retention import BlockFacts, Chains, Entry, LeastRecent, Retention, session_key
from tests.engine.scheduling.kept_blocks import ANY, STEPS, Step, drain, facts, live, name, path_of, store

POLICIES = [LeastRecent, ByValue]


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=STEPS)
def test_a_policy_drops_all_that_it_was_given_once_and_ends_of_prefixes_first(
    policy: Callable[[], Retention], steps: list[Step]
) -> None:
    live(policy(), steps, lambda life: ANY)


@given(steps=STEPS)
def test_the_least_recently_used_end_leaves_first(steps: list[Step]) -> None:
    live(LeastRecent(), steps, lambda life: min(life.ends(), key=life.age_order))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_is_there_is_not_added_again(policy: Callable[[], Retention]) -> None:
    kept = policy()
    store(kept, path_of(1), 0)
    with pytest.raises(KeyError, match="has block 00 already"):
        kept.add(name(0), facts(name(0)), 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_comes_after_its_tail_stays_as_long(policy: Callable[[], Retention]) -> None:
    """Stores end in any order, and some fail."""
    kept, chain = policy(), path_of(4)
    for now, digest in enumerate([chain[3], chain[0], chain[2]]):
        kept.add(digest, facts(digest), now)
    kept.add(chain[1], facts(chain[1]), 9)
    assert drain(kept, 10) == chain[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_held_is_not_dropped_nor_is_what_precedes_it(policy: Callable[[], Retention]) -> None:
    kept, chain = policy(), path_of(3)
    store(kept, chain, 0)
    kept.hold(chain[1])
    kept.hold(chain[1])
    assert drain(kept, 1) == [chain[2]]
    kept.release(chain[1])
    assert drain(kept, 2) == []
    kept.release(chain[1])
    assert drain(kept, 3) == [chain[1], chain[0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_are_not_there_are_ignored(policy: Callable[[], Retention]) -> None:
    kept, chain = policy(), path_of(3)
    kept.use(chain, 0)
    kept.end_turn("s", chain, 1)
    kept.supersede(chain)
    kept.remove(chain[0])
    kept.hold(chain[0])
    kept.release(chain[0])
    assert (len(kept), kept.pop_victim(2)) == (0, None)


@pytest.mark.parametrize("policy", POLICIES)
def test_queues_do_not_grow_with_what_came_and_went(policy: Callable[[], Chains]) -> None:
    kept = policy()
    for number in range(20_000):
        digest = number.to_bytes(4, "big")
        kept.add(digest, BlockFacts(0, tenant=f"tenant {number % 3}"), number)
        if number >= 10:
            assert kept.pop_victim(number) is not None
    assert sum(map(len, kept._queues())) < 5000


@pytest.mark.parametrize("policy", POLICIES)
def test_queues_do_not_grow_where_nothing_is_dropped_to_make_room(policy: Callable[[], Chains]) -> None:
    """A tier that is reset again and again is never full."""
    kept = policy()
    for now in range(100):
        for number in range(100):
            kept.add(bytes([number]), BlockFacts(0, tenant=f"tenant {number % 3}"), now)
        for number in range(100):
            kept.remove(bytes([number]))
    assert sum(map(len, kept._queues())) < 2000


def test_queues_do_not_grow_with_the_turns_of_a_session_that_goes_to_and_fro() -> None:
    kept = ByValue()
    branches = [[*path_of(2), *path_of(4, 0, 0, fork)[2:]] for fork in (1, 2)]
    for now in range(2000):
        chain = branches[now % 2]
        kept.use(chain, now)
        store(kept, chain, now, session="s")
        kept.end_turn("s", chain, now)
    assert len(kept) == 6
    assert sum(map(len, kept._queues())) < 2000


@pytest.mark.parametrize("tenants", [("",), ("a", "b", "c")])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_queues_of_a_full_tier_are_not_cleared_as_a_whole(
    policy: Callable[[], Chains], tenants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 50,000 blocks that took a tenth of a second, at each 50,000th store: every stream waited."""
    num_cleared = 0

    def spy(queue: list[Entry]) -> None:
        nonlocal num_cleared
        num_cleared += 1
        heapify(queue)

    monkeypatch.setattr(retention, "heapify", spy)
    kept = policy()
    for number in range(12_000):
        tenant = tenants[number % len(tenants)]
        digest, about = number.to_bytes(4, "big"), BlockFacts(0, cost_s=0.01, tenant=tenant)
        if number < 1000 or kept.pop_victim_for(digest, about, number) != digest:
            kept.add(digest, about, number)
    assert len(kept) == 1000
    assert num_cleared == 0


def test_sessions_of_one_name_are_told_apart_by_tenant_and_salt() -> None:
    asked = [
        ("a", "", "s"),
        ("b", "", "s"),
        ("", "a", "s"),
        ("as", "", "s"),
        ("a", "s", "s"),
        ("", "", "as"),
        ("", "", "s"),
    ]
    assert len({session_key(*one) for one in asked}) == len(asked)


@pytest.mark.parametrize("session", ["s", "x" * 100_000, "half a pair \ud800"])
def test_a_sessions_key_is_of_bounded_length(session: str) -> None:
    assert len(session_key("tenant", "salt", session)) == 32


def test_no_session_has_no_key() -> None:
    assert session_key("tenant", "salt", "") == ""
