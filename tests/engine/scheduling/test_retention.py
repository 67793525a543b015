"""Owns the contract of retention: which block a tier drops. Long: by age and by value, compared with slow oracles.
Never measures how good a policy is; benchmarks.retention does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import frexp, inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling import by_value, retention
from engine.scheduling.by_value import ByValue
from engine.scheduling.conversations import MAX_BRANCHES, Conversations
from engine.scheduling.retention import BlockFacts, Chains, LeastRecent, Retention, session_key
from engine.scheduling.return_times import NUM_INTERVALS, ReturnTimes, interval_of

POLICIES = [LeastRecent, ByValue]


def name(*path: int) -> bytes:
    """Return the digest of a block, given the choices that lead to it from the first block on."""
    return bytes(path)


def path_of(length: int, *fork: int) -> list[bytes]:
    """Return a chain of `length` blocks that begins with the blocks of `fork`."""
    return [name(*(*fork, *[0] * length)[: number + 1]) for number in range(length)]


def facts(digest: bytes, **fields: object) -> BlockFacts:
    values: dict[str, object] = {"cost_s": 0.01, **fields}
    return BlockFacts(16 * (len(digest) - 1), digest[:-1], **values)  # type: ignore[arg-type]


def store(kept: Retention, chain: Sequence[bytes], now: float, **fields: object) -> None:
    for digest in chain:
        if digest not in kept:
            kept.add(digest, facts(digest, **fields), now)


def drain(kept: Retention, now: float) -> list[bytes]:
    victims = []
    while (victim := kept.pop_victim(now)) is not None:
        victims.append(victim)
    return victims


# --- both policies ----------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """What a random life did, beside a model of it in plain values."""

    kept: Retention
    used_at: dict[bytes, float] = field(default_factory=dict)
    """The blocks that are there, and when each was last used."""
    tenants: dict[bytes, str] = field(default_factory=dict)
    superseded: set[bytes] = field(default_factory=set)
    holds: dict[bytes, int] = field(default_factory=dict)
    now: float = 0.0

    def ends(self) -> list[bytes]:
        """Return the blocks that may be dropped."""
        parents = {digest[:-1] for digest in self.used_at}
        return [digest for digest in self.used_at if digest not in parents and not self.holds.get(digest)]

    def age_order(self, digest: bytes) -> tuple[float, int]:
        return self.used_at[digest], -len(digest)

    def store(self, chain: list[bytes], whose: str) -> None:
        for digest in chain:
            if digest not in self.used_at:
                about = facts(digest, tenant=whose, session=whose, cost_s=0.01 * len(digest))
                self.kept.add(digest, about, self.now)
                self.used_at[digest], self.tenants[digest] = self.now, whose

    def use(self, chain: list[bytes], whose: str) -> None:
        self.kept.use(chain, self.now)
        self._touch(chain)

    def end(self, chain: list[bytes], whose: str) -> None:
        self.kept.end_turn("", chain, self.now)
        self._touch(chain)

    def _touch(self, chain: list[bytes]) -> None:
        self.superseded.difference_update(chain)
        self.used_at |= dict.fromkeys((digest for digest in chain if digest in self.used_at), self.now)

    def supersede(self, chain: list[bytes], whose: str) -> None:
        self.kept.supersede(chain[-2:])
        self.superseded.update(digest for digest in chain[-2:] if digest in self.used_at)

    def remove(self, chain: list[bytes], whose: str) -> None:
        self.kept.remove(chain[-1])
        self._forget(chain[-1])

    def _forget(self, digest: bytes) -> None:
        for kept in (self.used_at, self.tenants, self.holds):
            kept.pop(digest, None)
        self.superseded.discard(digest)

    def hold(self, chain: list[bytes], whose: str) -> None:
        self.kept.hold(chain[-1])
        if chain[-1] in self.used_at:
            self.holds[chain[-1]] = self.holds.get(chain[-1], 0) + 1

    def release(self, chain: list[bytes], whose: str) -> None:
        if self.holds.get(chain[-1]):
            self.kept.release(chain[-1])
            self.holds[chain[-1]] -= 1

    def pop(self, expected: Callable[[Life], bytes]) -> None:
        ends = self.ends()
        wanted = expected(self) if ends else None
        victim = self.kept.pop_victim(self.now)
        assert (victim is None) == (not ends)
        assert wanted in (victim, ANY)
        if victim is not None:
            assert victim in ends
            assert victim not in self.kept
            self._forget(victim)


ANY = b"any"
Step = tuple[str, list[bytes], str, float]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "use", "end", "pop", "pop", "remove", "supersede", "hold", "release"]),
        PATHS.map(lambda path: [name(*path[: number + 1]) for number in range(len(path))]),
        st.sampled_from(["", "", "a", "b"]),
        st.sampled_from([0.01, 0.5, 3.0, 40.0, 900.0]),
    ),
    max_size=60,
)


def live(kept: Retention, steps: list[Step], expected: Callable[[Life], bytes]) -> None:
    """Live a random life, and drop what is left. `expected`: what is to be dropped next; ANY if it does not matter."""
    life = Life(kept)
    for what, chain, whose, wait in steps:
        life.now += wait
        if what == "pop":
            life.pop(expected)
        else:
            getattr(life, what)(chain, whose)
        assert len(kept) == len(life.used_at)
        assert all(digest in kept for digest in life.used_at)
    while held := next((digest for digest, count in life.holds.items() if count), None):
        life.release([held], "")
    while life.used_at:
        life.pop(expected)
    assert kept.pop_victim(life.now) is None


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=STEPS)
def test_a_policy_drops_all_that_it_was_given_once_and_ends_of_prefixes_first(
    policy: Callable[[], Retention], steps: list[Step]
) -> None:
    live(policy(), steps, lambda life: ANY)


@given(steps=STEPS)
def test_the_least_recently_used_end_leaves_first(steps: list[Step]) -> None:
    live(LeastRecent(), steps, lambda life: min(life.ends(), key=life.age_order))


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


# --- by value ---------------------------------------------------------------------------------------------------------


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


# --- conversations ----------------------------------------------------------------------------------------------------

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


# --- sessions' names --------------------------------------------------------------------------------------------------


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


# --- return times -----------------------------------------------------------------------------------------------------


def test_intervals_grow_by_doubling_and_the_last_has_no_end() -> None:
    assert [interval_of(seconds) for seconds in (0, 0.25, 0.3, 1, 1e12)] == [0, 0, 1, 5, NUM_INTERVALS - 1]


def test_a_kind_that_returns_sooner_or_oftener_is_worth_more() -> None:
    sooner, later = ReturnTimes([(5, 100)], 100), ReturnTimes([(50, 100)], 100)
    oftener = ReturnTimes([(50, 190)], 10)
    assert sooner.rate(0) > oftener.rate(0) > later.rate(0) > 0


def test_a_pause_that_is_about_to_end_is_worth_holding_on_and_one_that_is_over_is_not() -> None:
    times = ReturnTimes([(30, 100)], 10)
    assert times.rate(20) > times.rate(1) > times.rate(300) == 0


def test_a_few_that_return_at_once_do_not_hide_the_many_that_return_later() -> None:
    times = ReturnTimes([(1, 10), (30, 1000)], 0)
    assert times.rate(0) > 0.02, "a few in the first second are 0.01 a second"


def test_old_observations_count_less_than_new_ones() -> None:
    times = ReturnTimes([(5, 100)], 0)
    for _ in range(10):
        times.forget_half()
    times.gone(10_000)
    fresh = ReturnTimes([(5, 100)], 1)
    assert times.rate(0) < fresh.rate(0)
