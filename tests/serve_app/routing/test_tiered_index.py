"""Contracts of what a router assumes about tiers: what they keep, and what of it has to be loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.stats import RoutingReport, TierReport, decode
from serve_app.routing.tiered_index import Found, TieredIndex
from tests.support.reports import stats

KEYS = tuple(bytes([number]) * 8 for number in range(1, 7))


def report(*cached: bytes, complete: bool = True, max_cached: int = 100, **tiers: tuple[bytes, ...]) -> RoutingReport:
    """Return an engine's report, with tiers that have just these keys and no more."""
    made = decode(stats(0.0))
    assert made is not None
    below = tuple(TierReport(keys, all_prefixes=True, num_blocks=100) for keys in tiers.values())
    return replace(made, prefix_keys=cached, all_prefixes=complete, max_cached_blocks=max_cached, tiers=below)


def index(**reports: RoutingReport) -> TieredIndex:
    made = TieredIndex(100)
    for name, one in reports.items():
        made.report(name, one, 1.0)
    return made


def test_what_a_tier_has_goes_on_where_the_cache_ends() -> None:
    found = index(a=report(*KEYS[:2], host=KEYS[2:3], disk=KEYS[3:5]))
    assert found.match("a", KEYS) == Found(5, 3)
    assert found.match("a", KEYS[:3]) == Found(3, 1)
    assert found.match("a", KEYS[:2]) == Found(2, 0)


def test_a_block_of_the_cache_behind_one_of_a_tier_need_not_be_loaded() -> None:
    found = index(a=report(KEYS[0], KEYS[2], disk=(KEYS[1],)))
    assert found.match("a", KEYS) == Found(3, 1)


def test_a_prefix_that_is_only_in_a_tier_is_found() -> None:
    """The cache's own index knows nothing of such a replica."""
    found = index(a=report(disk=KEYS[:2]), b=report(), c=report(KEYS[0]))
    assert found.holders(KEYS) == {"a": Found(2, 2), "c": Found(1, 0)}
    assert found.holders(()) == {}


def test_what_was_sent_to_an_engine_with_tiers_outlives_its_cache() -> None:
    """Its cache is too small for it, but what it computed was stored below before it left."""
    found = index(a=report(disk=()), b=report())
    for name in ("a", "b"):
        found.add(name, KEYS[:4], 2.0)
        assert found.match(name, KEYS) == Found(4, 0)
        cut = report(complete=False, max_cached=1)
        tier = TierReport((), all_prefixes=False, num_blocks=100)
        found.report(name, replace(cut, tiers=(tier,) if name == "a" else ()), 3.0)
    assert found.match("a", KEYS) == Found(4, 3)
    assert found.match("b", KEYS) == Found(1, 0)


def test_what_no_place_of_an_engine_has_any_more_is_not_expected_there() -> None:
    found = index(a=report(*KEYS[:1], disk=KEYS[1:4]))
    found.report("a", report(disk=KEYS[:1]), 2.0)
    assert found.match("a", KEYS) == Found(1, 1)
    found.report("a", report(), 3.0)  # started again without tiers
    assert found.match("a", KEYS) == Found(0, 0)
    found.add("a", KEYS[:2], 4.0)
    found.report("a", report(), 5.0)
    assert found.match("a", KEYS) == Found(0, 0), "no tier keeps what the cache has lost"


def test_a_forgotten_replica_has_nothing_anywhere() -> None:
    found = index(a=report(*KEYS[:1], disk=KEYS[1:4]))
    found.forget("a")
    assert (found.match("a", KEYS), found.num_blocks("a"), found.holders(KEYS)) == (Found(0, 0), 0, {})


parts = st.lists(st.sampled_from(KEYS), unique=True, max_size=6)


@settings(deadline=None)
@given(cached=parts, host=parts, disk=parts)
def test_a_prompts_depth_is_that_of_all_places_together_and_the_cache_goes_first(
    cached: list[bytes], host: list[bytes], disk: list[bytes]
) -> None:
    found = index(a=report(*cached, host=tuple(host), disk=tuple(disk)))
    everywhere: dict[bytes, Any] = dict.fromkeys([*cached, *host, *disk])
    depth = next((depth for depth, key in enumerate(KEYS) if key not in everywhere), len(KEYS))
    assert found.match("a", KEYS) == Found(depth, sum(key not in cached for key in KEYS[:depth]))
    assert found.holders(KEYS) == ({"a": found.match("a", KEYS)} if depth else {})
