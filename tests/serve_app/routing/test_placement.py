"""Contracts of placement: which replicas may take a request, and which of them does."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.placement import NUM_DRAWN, Ask, Bound, Candidate, rank, session_weight, two_choices

LOOSE = Bound(load_factor=1.25, slack_tokens=2048)
TIGHT = Bound(load_factor=1.25, slack_tokens=100)
ids = st.sampled_from([f"r{i}" for i in range(8)])
loads = st.integers(0, 20_000)
candidate = st.builds(
    Candidate,
    replica_id=ids,
    load=loads,
    num_cached_tokens=st.integers(0, 5000),
    num_loaded_tokens=st.integers(0, 5000),
    num_free_tokens=st.none() | st.integers(0, 10_000),
    adapter_tokens=st.sampled_from([0, 3000]),
    full=st.booleans(),
    token_cost=st.sampled_from([0.5, 1.0, 3.0]),
    pair_cost=st.sampled_from([0.0, 0.01]),
).map(lambda one: one._replace(num_loaded_tokens=min(one.num_loaded_tokens, one.num_cached_tokens)))
fleets = st.lists(candidate, min_size=1, max_size=8, unique_by=lambda one: one.replica_id)
bounds = st.builds(Bound, load_factor=st.floats(1, 2), slack_tokens=st.integers(0, 4000))
asks = st.builds(
    Ask,
    num_tokens=st.integers(1, 5000),
    session=st.none() | st.text(),
    avoid=st.frozensets(ids, max_size=4),
    load_cost=st.floats(0, 1),
)
seeds = st.builds(Random, st.integers())
untimed = settings(deadline=None)


def first(ask: Ask, fleet: list[Candidate], bound: Bound = LOOSE, seed: int = 0) -> str:
    return rank(ask, fleet, bound, Random(seed))[0][0]


def named(**loads: int) -> list[Candidate]:
    return [Candidate(name, load=load) for name, load in loads.items()]


# --- who may take it -------------------------------------------------------------------------------------------------


@untimed
@given(ask=asks, fleet=fleets, bound=bounds, random=seeds)
def test_no_avoided_replica_is_ranked_while_another_lives(
    ask: Ask, fleet: list[Candidate], bound: Bound, random: Random
) -> None:
    ranked = {name for names in rank(ask, fleet, bound, random) for name in names}
    live = {one.replica_id for one in fleet}
    assert ranked == ((live - ask.avoid) or live), "every other replica is ranked once, and none is made up"


@untimed
@given(ask=asks, fleet=fleets, bound=bounds, random=seeds)
def test_no_replica_beyond_the_bound_comes_before_one_within_it(
    ask: Ask, fleet: list[Candidate], bound: Bound, random: Random
) -> None:
    allowed = [one for one in fleet if one.replica_id not in ask.avoid] or fleet
    most = bound.load_limit(allowed)
    ready = [one for one in allowed if not one.full]
    ranks = rank(ask, fleet, bound, random)
    by_id = {one.replica_id: one for one in fleet}
    within = [by_id[name].load <= most for names in ranks for name in names if not by_id[name].full]
    assert within == sorted(within, reverse=True)
    assert len(within) == len(ready)


@untimed
@given(fleet=fleets, bound=bounds)
def test_who_has_least_to_do_is_within_the_bound(fleet: list[Candidate], bound: Bound) -> None:
    assert min(one.load for one in fleet) <= bound.load_limit(fleet) + 1e-6


@untimed
@given(ask=asks, fleet=fleets, bound=bounds, random=seeds)
def test_full_replicas_come_last_in_one_rank(ask: Ask, fleet: list[Candidate], bound: Bound, random: Random) -> None:
    full = {one.replica_id for one in fleet if one.full}
    ranks = rank(ask, fleet, bound, random)
    assert all(not full & set(names) for names in ranks[:-1])
    assert not full & set(ranks[-1]) or set(ranks[-1]) <= full


def test_the_last_replica_is_asked_even_if_it_is_to_be_avoided() -> None:
    assert first(Ask(10, avoid=frozenset({"a"})), named(a=0)) == "a"


def test_without_replicas_there_are_no_ranks() -> None:
    assert rank(Ask(10), [], LOOSE, Random(0)) == []
    assert two_choices([], Random(0)) == []


@untimed
@given(ask=asks, fleet=fleets, bound=bounds, seed=st.integers())
def test_the_same_knowledge_and_random_source_give_the_same_ranks(
    ask: Ask, fleet: list[Candidate], bound: Bound, seed: int
) -> None:
    before = list(fleet)
    assert rank(ask, fleet, bound, Random(seed)) == rank(ask, fleet, bound, Random(seed))
    assert fleet == before


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queued", "chosen"), [(700, "warm"), (900, "cold")])
def test_a_cached_prefix_is_worth_exactly_the_tokens_that_it_saves(queued: int, chosen: str) -> None:
    fleet = [Candidate("warm", load=queued, num_cached_tokens=800), Candidate("cold")]
    assert first(Ask(1000), fleet) == chosen


def test_the_holder_of_the_longer_prefix_wins_while_loads_are_equal() -> None:
    fleet = [Candidate("short", num_cached_tokens=100), Candidate("long", num_cached_tokens=800), Candidate("none")]
    assert {first(Ask(1000), fleet, seed=seed) for seed in range(20)} == {"long"}


def test_a_holder_beyond_the_bound_loses_to_one_within_it_whatever_it_saves() -> None:
    fleet = [Candidate("warm", load=3000, num_cached_tokens=50_000), Candidate("cold")]
    assert first(Ask(50_000), fleet, TIGHT) == "cold"
    assert first(Ask(50_000), fleet, Bound(1.25, 2048)) == "warm"


def test_a_holder_is_considered_among_any_number_of_replicas_that_have_nothing() -> None:
    fleet = [*named(**{f"r{i}": 0 for i in range(50)}), Candidate("warm", load=10, num_cached_tokens=900)]
    assert {first(Ask(1000), fleet, seed=seed) for seed in range(50)} == {"warm"}


def test_a_replica_without_room_in_its_cache_comes_after_one_with_room() -> None:
    fleet = [Candidate("tight", num_free_tokens=999), Candidate("roomy", load=1500, num_free_tokens=1000)]
    assert first(Ask(1000), fleet) == "roomy"


def test_what_is_cached_needs_no_room() -> None:
    fleet = [Candidate("warm", num_cached_tokens=900, num_free_tokens=100), Candidate("cold", num_free_tokens=5000)]
    assert first(Ask(1000), fleet) == "warm"


# --- by time ---------------------------------------------------------------------------------------------------------


def timed(name: str, load: float, token_s: float = 0.001, pair_s: float = 0.0, **others: int) -> Candidate:
    return Candidate(name, load, token_cost=token_s, pair_cost=pair_s, **others)


@pytest.mark.parametrize(("queued_s", "chosen"), [(0.9, "fast"), (1.1, "slow")])
def test_a_faster_replica_is_chosen_as_long_as_the_first_token_comes_sooner_there(queued_s: float, chosen: str) -> None:
    assert first(Ask(1000), [timed("fast", queued_s), timed("slow", 0.0, token_s=0.002)]) == chosen


@pytest.mark.parametrize(("queued_s", "chosen"), [(0.3, "warm"), (0.5, "cold")])
def test_a_cached_head_saves_its_own_time_and_not_that_of_the_tail_that_attends_to_it(
    queued_s: float, chosen: str
) -> None:
    """The second half of the tokens has three quarters of the pairs: the first saves 0.25 s, and 0.0625 s."""
    fleet = [timed("warm", queued_s, 0.0005, 2.5e-7 * 2, num_cached_tokens=500), timed("cold", 0.0, 0.0005, 2.5e-7 * 2)]
    assert first(Ask(1000), fleet) == chosen


@pytest.mark.parametrize(("queued_s", "chosen"), [(0.9, "has"), (1.1, "lacks")])
def test_an_adapter_costs_what_so_many_tokens_take(queued_s: float, chosen: str) -> None:
    fleet = [timed("has", queued_s, 0.002), timed("lacks", 0.0, 0.002, adapter_tokens=500)]
    assert first(Ask(10), fleet) == chosen


def test_the_slack_is_what_so_many_tokens_take() -> None:
    fleet = [timed("warm", 2.0, num_cached_tokens=9000), timed("cold", 0.0)]
    assert first(Ask(9000), fleet, Bound(1.25, 500)) == "cold"
    assert first(Ask(9000), fleet, Bound(1.25, 1000)) == "warm"


# --- power of two choices --------------------------------------------------------------------------------------------


def test_with_everything_equal_the_choice_spreads() -> None:
    fleet, random = named(a=0, b=0, c=0, d=0), Random(1)
    counts = Counter(rank(Ask(100), fleet, LOOSE, random)[0][0] for _ in range(4000))
    assert all(800 < counts[name] < 1200 for name in "abcd"), counts


def test_the_less_loaded_of_two_drawn_at_random_is_chosen_so_that_the_most_loaded_never_is() -> None:
    fleet, random = named(a=0, b=10, c=20, d=30), Random(1)
    counts = Counter(rank(Ask(100), fleet, LOOSE, random)[0][0] for _ in range(2000))
    assert counts["d"] == 0
    assert counts["a"] > counts["b"] > counts["c"] > 0, "but not all go to the least loaded one"


def test_a_call_that_computes_nothing_gets_two_at_random_then_the_others_then_the_full() -> None:
    fleet = [*named(a=0, b=0, c=9), Candidate("x", full=True)]
    random = Random(1)
    seen = set()
    for _ in range(100):
        pair, rest, full = two_choices(fleet, random)
        assert sorted(pair + rest) == ["a", "b", "c"]
        assert (len(pair), full) == (2, ["x"])
        seen |= set(pair)
    assert seen == {"a", "b", "c"}


@untimed
@given(ask=asks, fleet=fleets, random=seeds)
def test_whoever_neither_holds_the_prefix_nor_was_drawn_is_tried_in_order_of_room_and_load(
    ask: Ask, fleet: list[Candidate], random: Random
) -> None:
    """A first choice may turn the request away, so what comes after it is a choice, too."""
    ready = [one._replace(full=False) for one in fleet]
    calm = Ask(ask.num_tokens, load_cost=ask.load_cost)
    by_id = {one.replica_id: one for one in ready}
    order = [by_id[name] for (name,) in rank(calm, ready, Bound(1.0, 10**9), random)]
    dearest = max(one.adapter_tokens for one in order)
    holders = [one for one in order if one.num_cached_tokens or one.adapter_tokens < dearest]
    num_first = min(len(order), len(holders) + NUM_DRAWN)

    def lacks_room(one: Candidate) -> bool:
        need = max(calm.num_tokens - one.num_cached_tokens, 1) + one.num_loaded_tokens
        return one.num_free_tokens is not None and one.num_free_tokens < need

    def work(one: Candidate) -> float:
        new = max(calm.num_tokens - one.num_cached_tokens, 1)
        pairs = sum(range(calm.num_tokens - new + 1, calm.num_tokens + 1))
        work = one.load + one.token_cost * (new + one.adapter_tokens) + one.pair_cost * pairs
        loaded = sum(range(one.num_cached_tokens - one.num_loaded_tokens + 1, one.num_cached_tokens + 1))
        return work + calm.load_cost * (one.token_cost * one.num_loaded_tokens + one.pair_cost * loaded)

    assert not any(one in holders for one in order[num_first:])
    for part, key in ((order[:num_first], work), (order[num_first:], lambda one: one.load)):
        costs = [(lacks_room(one), key(one)) for one in part]
        assert all(one[0] < other[0] or one[1] <= other[1] * (1 + 1e-9) for one, other in pairwise(costs))


# --- tiers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_cost", "chosen"), [(0.1, "loads"), (0.4, "loads"), (0.6, "computes")])
def test_a_prefix_in_a_tier_counts_what_loading_it_saves(load_cost: float, chosen: str) -> None:
    """One replica loads 800 of 1,000 tokens, and the other one has 400 fewer to do before."""
    fleet = [Candidate("loads", load=400, num_cached_tokens=800, num_loaded_tokens=800), Candidate("computes")]
    assert first(Ask(1000, load_cost=load_cost), fleet) == chosen


def test_a_prefix_in_the_cache_goes_before_the_same_one_in_a_tier_and_this_before_none() -> None:
    fleet = [
        Candidate("none"),
        Candidate("loads", num_cached_tokens=800, num_loaded_tokens=800),
        Candidate("loads half", num_cached_tokens=800, num_loaded_tokens=400),
        Candidate("has it", num_cached_tokens=800),
    ]
    ranks = rank(Ask(1000, load_cost=0.2), fleet, LOOSE, Random(0))
    assert [name for (name,) in ranks] == ["has it", "loads half", "loads", "none"]


def test_what_is_loaded_needs_room_in_the_cache_like_what_is_computed() -> None:
    """It would otherwise go to an engine that has to preempt for it."""
    full = Candidate("full", num_cached_tokens=900, num_loaded_tokens=900, num_free_tokens=500)
    fleet = [full, Candidate("free", num_free_tokens=5000)]
    assert first(Ask(1000, load_cost=0.2), fleet) == "free"
    assert first(Ask(1000, load_cost=0.2), [full._replace(num_free_tokens=1000), fleet[1]]) == "full"


def test_engines_that_share_a_disk_are_chosen_by_their_load() -> None:
    fleet = [
        Candidate(name, load=load, num_cached_tokens=900, num_loaded_tokens=900)
        for name, load in {"busy": 900, "idle": 0, "between": 500}.items()
    ]
    ranks = rank(Ask(1000, load_cost=0.2), fleet, LOOSE, Random(0))
    assert [name for (name,) in ranks] == ["idle", "between", "busy"]


# --- sessions --------------------------------------------------------------------------------------------------------


@untimed
@given(fleet=fleets, session=st.text(), seeds=st.tuples(st.integers(), st.integers()))
def test_a_session_stays_while_replicas_and_loads_do(
    fleet: list[Candidate], session: str, seeds: tuple[int, int]
) -> None:
    ready = [one._replace(full=False) for one in fleet]
    assert first(Ask(10, session), ready, seed=seeds[0]) == first(Ask(10, session), ready, seed=seeds[1])


@untimed
@given(names=st.lists(ids, min_size=2, max_size=8, unique=True), data=st.data())
def test_removing_a_replica_moves_only_its_sessions(names: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    before, after = named(**dict.fromkeys(names, 0)), named(**dict.fromkeys([n for n in names if n != gone], 0))
    for session in (f"s{i}" for i in range(50)):
        home = first(Ask(10, session), before)
        assert home == gone or first(Ask(10, session), after) == home


def test_sessions_spread_over_the_replicas() -> None:
    fleet = named(a=0, b=0, c=0)
    counts = Counter(first(Ask(10, f"session {i}"), fleet) for i in range(3000))
    assert all(800 < counts[name] < 1200 for name in "abc"), counts


def test_a_session_leaves_a_home_beyond_the_bound_for_its_second_and_comes_back() -> None:
    order = sorted("abc", key=lambda name: -session_weight("s", name))
    calm = named(a=0, b=0, c=0)
    busy = [one._replace(load=1000 * (one.replica_id == order[0])) for one in calm]
    assert first(Ask(10, "s"), calm, TIGHT) == order[0]
    assert first(Ask(10, "s"), busy, TIGHT) == order[1]
    assert first(Ask(10, "s"), busy, LOOSE) == order[0]


def test_half_a_character_in_a_session_id_is_no_error() -> None:
    """JSON can carry a lone surrogate. Encoding it strictly raised an exception inside the router,
    where nobody catches it."""
    assert first(Ask(10, "\ud800"), named(a=0)) == "a"


# --- adapters ---------------------------------------------------------------------------------------------------------


def placed(num_engines: int, *holders: str, load: int = 0) -> list[str]:
    """Return the order of engines e0, e1, ... for a request whose adapter the `holders` have;
    the holders have `load` to do."""
    engines = [
        Candidate(name, load=load * (name in holders), adapter_tokens=0 if name in holders else 100)
        for name in (f"e{number}" for number in range(num_engines))
    ]
    return [name for names in rank(Ask(50), engines, Bound(1.25, 10_000), Random(1)) for name in names]


def test_a_request_goes_to_an_engine_that_has_its_adapter_out_of_many() -> None:
    """Two engines drawn at random would mostly miss the one that has it."""
    assert placed(30, "e17")[0] == "e17"
    assert set(placed(30, "e3", "e17")[:2]) == {"e3", "e17"}


def test_a_request_spills_over_once_the_holders_have_more_to_do_than_reading_the_adapter_counts() -> None:
    assert placed(4, "e2", load=99)[0] == "e2"
    assert placed(4, "e2", load=101)[0] != "e2"


def test_a_holder_above_the_bound_comes_after_the_others() -> None:
    engines = [Candidate("e0", load=500), *(Candidate(f"e{i}", adapter_tokens=10_000) for i in (1, 2, 3))]
    assert rank(Ask(50), engines, Bound(1.25, 0), Random(1))[-1] == ["e0"]


def test_where_all_or_none_have_it_the_adapter_changes_nothing() -> None:
    for tokens in (0, 100):
        engines = [Candidate(f"e{i}", load=10 * i, adapter_tokens=tokens) for i in range(6)]
        plain = [Candidate(f"e{i}", load=10 * i) for i in range(6)]
        assert rank(Ask(50), engines, Bound(1.25, 10_000), Random(3)) == rank(
            Ask(50), plain, Bound(1.25, 10_000), Random(3)
        )
