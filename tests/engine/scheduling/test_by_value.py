"""Owns the contract of what a tier drops by value: the choice that a search of all blocks would make, kind by kind.
Never measures how good the choice is; benchmarks.retention does."""

from __future__ import annotations

from collections import Counter
from math import frexp, inf, sqrt

import pytest
from hypothesis import given

from engine.scheduling import by_value, retention
from engine.scheduling.by_value import ByValue
from engine.scheduling.retention import BlockFacts
from engine.scheduling.return_times import NUM_INTERVALS, interval_of
from tests.engine.scheduling.kept_blocks import STEPS, Life, Step, drain, live, name, path_of, store


@given(steps=STEPS)
def test_by_value_chooses_as_a_search_of_all_blocks_does(steps: list[Step]) -> None:
    kept = ByValue(look_again=1)
    live(kept, steps, lambda life: _search(kept, life))


def _search(kept: ByValue, life: Life) -> bytes:
    """Return what is to be dropped: the oldest of the superseded, or else what is worth least."""
    ends = life.ends()
    if superseded := [digest for digest in ends if digest in life.superseded]:
        return min(superseded, key=life.age_order)
    value, _, victim = _least(kept, life, ends)
    sizes = Counter(life.tenants.values())
    above = [tenant for tenant in sizes if sizes[tenant] * len(sizes) > len(life.tenants)]
    if life.tenants[victim] in above:
        return victim
    others = [found for tenant in above if (found := [end for end in ends if life.tenants[end] == tenant])]
    least, _, other = min((_least(kept, life, found) for found in others), default=(inf, (0.0, 0), victim))
    return other if least < by_value.PROTECTION * value else victim


def _least(kept: ByValue, life: Life, ends: list[bytes]) -> tuple[float, tuple[float, int], bytes]:
    """Return the least valued of the oldest blocks, of one for each kind and octave of weight."""
    groups: dict[tuple[int, int], list[bytes]] = {}
    for digest in ends:
        block = kept._blocks[digest]
        assert block.kind != by_value.SUPERSEDED
        groups.setdefault((block.kind, frexp(sqrt(0.01 * len(digest)))[1]), []).append(digest)
    oldest = [min(group, key=life.age_order) for group in groups.values()]
    return min((_value(kept, life, digest), life.age_order(digest), digest) for digest in oldest)


def _value(kept: ByValue, life: Life, digest: bytes) -> float:
    rate = kept._times[kept._blocks[digest].kind].rate(life.now - life.used_at[digest])
    return sqrt(0.01 * len(digest)) * rate


def test_superseded_blocks_leave_first_however_dear_and_recent() -> None:
    kept = ByValue()
    old, new = path_of(2, 1), path_of(2, 2)
    store(kept, old, 0, cost_s=0.001)
    store(kept, new, 100, cost_s=10.0)
    kept.supersede(new)
    assert drain(kept, 101) == [*new[::-1], *old[::-1]]


def test_superseded_blocks_leave_first_though_another_queue_was_chosen_just_now() -> None:
    kept = ByValue()
    for number in range(4):
        store(kept, path_of(1, number), number)
    assert kept.pop_victim(5) == name(0)
    kept.supersede([name(3)])
    assert drain(kept, 6) == [name(3), name(1), name(2)]


def test_a_choice_among_queues_does_not_last() -> None:
    kept = ByValue()
    session, prompts = path_of(1, 1), [path_of(1, 2), path_of(1, 3)]
    store(kept, session, 0, session="s")
    store(kept, prompts[0], 0)
    assert kept.pop_victim(1) == name(2)
    store(kept, prompts[1], 49_990)
    assert kept.pop_victim(50_000) == name(1)


@pytest.mark.parametrize("how", ["asked for", "part of a new turn"])
def test_a_superseded_block_is_worth_something_again_when_it_is(how: str) -> None:
    kept = ByValue()
    one, two, once = path_of(2, 1), path_of(2, 2), path_of(2, 3)
    store(kept, once, 0)
    for chain in (one, two):
        store(kept, chain, 0)
        kept.supersede(chain)
    if how == "asked for":
        kept.use(one, 1)
    else:
        kept.end_turn("", one, 1)
    assert drain(kept, 2) == [*two[::-1], *once[::-1], *one[::-1]]


def test_a_turn_supersedes_what_its_session_asked_for_before_and_it_does_not_contain() -> None:
    """Thoughts are left out of the next prompt, so that all behind them moves."""
    kept = ByValue()
    system = path_of(2)
    before, after = [*system, *path_of(5, 0, 0, 1)[2:]], [*system, *path_of(6, 0, 0, 2)[2:]]
    store(kept, before, 0, session="s")
    kept.end_turn("s", before, 1)
    store(kept, after, 2, session="s")
    kept.end_turn("s", after, 3)
    other = path_of(3, 7)
    store(kept, other, 4)
    assert drain(kept, 5)[:3] == before[:1:-1]


def test_a_session_of_another_name_supersedes_nothing() -> None:
    kept = ByValue()
    before, after, once = path_of(4, 1, 1), path_of(4, 1, 2), path_of(3, 7)
    store(kept, once, 0)
    for now, (session, chain) in enumerate([("a", before), ("b", after)]):
        store(kept, chain, now, session=session)
        kept.end_turn(session, chain, now)
    assert drain(kept, 2)[:3] == once[::-1]


def test_a_turn_supersedes_nothing_that_others_have_asked_for_too() -> None:
    """Regression: a session that turned from a document to another took the document from those who went on asking."""
    kept = ByValue()
    system = path_of(1)
    document, after, once = [*system, *path_of(4, 0, 1)[1:]], [*system, *path_of(5, 0, 2)[1:]], path_of(3, 7)
    store(kept, once, 0)
    for now, session in enumerate(["a", "b", "c", "b"], 1):
        kept.use([digest for digest in document if digest in kept], now)
        store(kept, document, now, session=session)
        kept.end_turn(session, document, now)
    store(kept, after, 5, session="a")
    kept.end_turn("a", after, 5)
    assert drain(kept, 6)[:3] == once[::-1]


def test_a_prompt_that_nobody_came_back_to_leaves_before_a_session_in_a_pause() -> None:
    kept = ByValue()
    session, once = path_of(3, 1), path_of(3, 2)
    store(kept, session, 0, session="s")
    kept.end_turn("s", session, 1)
    store(kept, once, 2)
    kept.end_turn("", once, 3)
    assert drain(kept, 5)[:3] == once[::-1]


def test_a_session_that_did_not_come_back_for_long_leaves_before_a_fresh_prompt() -> None:
    kept = ByValue()
    session, once = path_of(3, 1), path_of(3, 2)
    store(kept, session, 0, session="s")
    kept.end_turn("s", session, 1)
    store(kept, once, 50_000)
    assert drain(kept, 50_001)[:3] == session[::-1]


def test_of_two_prompts_alike_the_cheaper_one_leaves_first() -> None:
    kept = ByValue()
    dear, cheap = path_of(1, 1), path_of(1, 2)
    store(kept, dear, 0, cost_s=1.0)
    store(kept, cheap, 0, cost_s=0.1)
    assert drain(kept, 1) == [*cheap, *dear]


def test_blocks_of_unknown_cost_count_as_others_do() -> None:
    """Costs are predicted only after the first steps; 1 s for all before would keep these for ever."""
    kept = ByValue()
    store(kept, path_of(1, 1), 0, cost_s=0.001)
    store(kept, path_of(1, 2), 0, cost_s=None)
    store(kept, path_of(1, 3), 0, cost_s=0.002)
    assert drain(kept, 1) == [*path_of(1, 1), *path_of(1, 2), *path_of(1, 3)]


def test_what_returns_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts without a session return after 20 s here, and sessions never: the opposite of what is expected."""
    monkeypatch.setattr(by_value, "LEAST", 256)
    kept = ByValue()
    for number in range(3000):
        now = 30.0 * number
        plain, session = number.to_bytes(3, "big"), b"s" + number.to_bytes(3, "big")
        kept.add(plain, BlockFacts(0), now)
        kept.add(session, BlockFacts(0, session=str(number)), now)
        kept.use([plain], now + 20)
        kept.remove(plain)
        while len(kept) > 100:
            kept.pop_victim(now + 20)
    kept.add(b"plain", BlockFacts(0), now + 30)
    kept.add(b"session", BlockFacts(0, session="new"), now + 30)
    victims = drain(kept, now + 31)
    assert victims.index(b"session") < victims.index(b"plain")


def test_the_return_of_a_block_that_was_dropped_is_learned_from() -> None:
    kept = ByValue()
    kept.add(b"a", BlockFacts(0), 0)
    assert kept.pop_victim(5) == b"a"
    before = kept._times[by_value.ONCE].total
    kept.add(b"a", BlockFacts(0), 10)
    assert kept._times[by_value.ONCE].total == before + 1
    assert kept._blocks[b"a"].kind == by_value.USED


def test_asking_for_room_learns_nothing_of_a_newcomer_that_is_let_in() -> None:
    """Regression: a full tier entered a block to find what to drop for it, removed it until it was stored, and had
    forgotten by then that it had dropped the block before."""
    kept = ByValue()
    kept.add(b"a", BlockFacts(0), 0)
    assert kept.pop_victim(5) == b"a"
    kept.add(b"b", BlockFacts(0), 6)
    before = kept._times[by_value.ONCE].total
    assert kept.pop_victim_for(b"a", BlockFacts(0), 10) == b"b"
    assert b"a" not in kept
    assert kept._times[by_value.ONCE].total == before
    kept.add(b"a", BlockFacts(0), 11)
    assert kept._times[by_value.ONCE].total == before + 1
    assert kept._blocks[b"a"].kind == by_value.USED


def test_a_newcomer_that_is_worth_least_is_not_let_in_and_its_return_is_learned() -> None:
    kept = ByValue()
    kept.add(b"a", BlockFacts(0, cost_s=1e-9), 0)
    assert kept.pop_victim(5) == b"a"
    kept.add(b"b", BlockFacts(0, cost_s=10.0), 6)
    before = kept._times[by_value.ONCE].total
    assert kept.pop_victim_for(b"a", BlockFacts(0, cost_s=1e-9), 10) == b"a"
    assert (b"a" in kept, b"b" in kept) == (False, True)
    assert kept._times[by_value.ONCE].total == before + 1
    assert kept._ghosts[b"a"] == (by_value.USED, 10)


def test_a_block_that_was_dropped_while_its_request_ran_is_waited_for_from_the_end() -> None:
    kept = ByValue()
    kept.add(b"a", BlockFacts(0), 0)
    assert kept.pop_victim(5) == b"a"
    kept.end_turn("", [b"a"], 1000)
    before = list(kept._times[by_value.ONCE]._returned)
    kept.add(b"a", BlockFacts(0), 1003)
    after = kept._times[by_value.ONCE]._returned
    assert [number for number in range(NUM_INTERVALS) if after[number] != before[number]] == [interval_of(3)]


def test_the_tenant_with_the_most_loses_first_among_blocks_alike() -> None:
    kept = ByValue()
    small, large = path_of(2, 1), path_of(6, 2)
    store(kept, small, 0, tenant="small")
    store(kept, large, 1, tenant="large")
    assert drain(kept, 2)[:3] == large[:2:-1], "until it has its share"


def test_a_choice_for_one_tenant_is_none_for_another() -> None:
    kept = ByValue()
    for now, tenant in enumerate(["large", "small", "large", "large", "large"]):
        store(kept, path_of(1, now), now, tenant=tenant)
    assert [kept.pop_victim(5), kept.pop_victim(5)] == [name(0), name(2)]


def test_a_tenants_share_does_not_keep_what_is_worth_nothing() -> None:
    kept = ByValue()
    junk, large = path_of(2, 1), path_of(6, 2)
    store(kept, junk, 0, tenant="small")
    store(kept, large, 40_000, tenant="large", session="s")
    kept.end_turn("s", large, 40_000)
    assert drain(kept, 40_001)[:2] == junk[::-1]


def test_a_hundred_thousand_blocks_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts comparisons of queues, instead of time: they do not grow with the number of blocks."""
    looks = 0
    front = by_value.ByValue._front

    def counting(self: ByValue, queue: list[retention.Entry]) -> retention.Block | None:
        nonlocal looks
        looks += 1
        return front(self, queue)

    monkeypatch.setattr(by_value.ByValue, "_front", counting)
    kept = ByValue()
    for number in range(100_000):
        kept.add(number.to_bytes(4, "big"), BlockFacts(16 * (number % 500), cost_s=0.001), 0.001 * number)
    for number in range(1000):
        assert kept.pop_victim(100 + 0.001 * number) is not None
    assert looks < 4000
