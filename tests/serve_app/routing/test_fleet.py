"""Contracts of a router's knowledge: how a report and its own record add up to one load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import PrefillCosts
from serve_app.engines.engine_load import EngineLoad
from serve_app.routing import fleet as fleet_module
from serve_app.routing.fleet import FLIGHT_S, Fleet, PredictedLoad, ReplicaLoad
from serve_app.routing.tiered_index import Found
from tests.support.reports import stats

BLOCK_SIZE = 4
KEYS = (b"1" * 8, b"2" * 8)
NOW = 100.0


def fleet(**reports: dict[str, Any]) -> Fleet:
    made = Fleet(BLOCK_SIZE, 100)
    made.update(reports)
    return made


def test_without_a_report_the_load_is_what_was_sent_and_has_not_ended() -> None:
    known = fleet(a={})
    for attempt, tokens in (("r1", 100), ("r2", 30)):
        known.open(attempt)
        known.place(attempt, "a", tokens, (), now=1.0)
    assert known.load("a", NOW) == ReplicaLoad(2, 130, None)
    known.close("r1")
    assert known.load("a", NOW) == ReplicaLoad(1, 30, None)


def test_the_end_of_a_thousand_requests_at_once_costs_as_much_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end summed up all that was sent since the last report: clients that left together held up the router."""
    known, added = fleet(a={}), 0
    add = fleet_module._Replica.add

    def spy(replica: Any, sent: Any) -> None:
        nonlocal added
        added += 1
        add(replica, sent)

    monkeypatch.setattr(fleet_module._Replica, "add", spy)
    for number in range(1000):
        known.open(str(number))
        known.place(str(number), "a", 10, (), now=1.0)
    for number in range(900):
        known.close(str(number))
    assert known.load("a", NOW) == ReplicaLoad(100, 1000, None)
    assert added == 1000 + 100


def test_a_report_counts_what_was_sent_before_it_and_the_record_what_was_sent_after() -> None:
    known = fleet(a={})
    known.open("before")
    known.place("before", "a", 100, (), now=1.0)
    known.open("after")
    known.place("after", "a", 30, (), now=5.0)
    known.update({"a": stats(4.0, requests=3, queued=50, free_blocks=20)})
    assert known.load("a", NOW) == ReplicaLoad(4, 80, 20 * BLOCK_SIZE - 30)


def test_a_request_that_may_have_been_on_its_way_when_the_report_was_taken_counts() -> None:
    known = fleet(a={})
    known.open("r")
    known.place("r", "a", 100, (), now=4.0 - FLIGHT_S / 2)
    known.update({"a": stats(4.0)})
    assert known.load("a", NOW).num_requests == 1


def test_the_end_of_a_reported_request_counts_before_the_next_report_says_so() -> None:
    known = fleet(a={})
    known.open("r")
    known.place("r", "a", 100, (), now=1.0)
    known.update({"a": stats(4.0, requests=3)})
    known.close("r")
    assert known.load("a", NOW).num_requests == 2
    known.update({"a": stats(5.0, requests=2)})
    assert known.load("a", NOW).num_requests == 2


def test_the_same_report_again_changes_nothing() -> None:
    """Serve sends all replicas' stats again whenever one of them changes."""
    known = fleet(a={})
    known.open("r")
    known.place("r", "a", 10, KEYS, now=1.0)
    known.update({"a": stats(4.0, requests=3)})
    known.close("r")
    known.update({"a": stats(4.0, requests=3), "b": {}})
    assert known.load("a", NOW).num_requests == 2


def test_a_queue_becomes_shorter_between_reports_as_fast_as_the_engine_says() -> None:
    """Otherwise a prompt that was sent half a second ago, and has long been computed,
    would drive others from its prefix."""
    known = fleet(a=stats(10.0, queued=300, rate=100))
    assert [known.load("a", now).num_queued_tokens for now in (9.0, 10.0, 11.5, 13.0, 14.0)] == [300, 300, 150, 0, 0]
    known.open("r")
    known.place("r", "a", 200, (), now=14.0)  # an engine does not compute ahead while it is idle
    assert [known.load("a", now).num_queued_tokens for now in (14.0, 15.0, 16.0, 17.0)] == [200, 100, 0, 0]
    assert known.load("a", 17.0).num_requests == 1


COSTS = PrefillCosts(0.001, 1e-6)


def queued_s(known: Fleet, now: float) -> float:
    loads = known.predicted_loads(["a"], now)
    assert loads is not None
    return loads[0].queued_s


def test_predicted_seconds_pass_by_themselves() -> None:
    known = fleet(a=stats(10.0, queued=300, rate=1, queued_s=3.0, costs=COSTS))
    assert [queued_s(known, now) for now in (9.0, 10.0, 11.5, 13.0, 14.0)] == [3.0, 3.0, 1.5, 0, 0]


def test_what_was_sent_since_the_report_counts_in_the_same_unit() -> None:
    known = fleet(a=stats(10.0, requests=2, queued_s=3.0, costs=COSTS, free_blocks=90))
    known.open("r")
    known.place("r", "a", 200, (), 11.0, cached=Found(100))
    sent_s = COSTS.seconds(100, 300)
    assert known.predicted_loads(["a"], 12.0) == [PredictedLoad(3, 3.0 - 1.0 + sent_s - 1.0, 0.001, 1e-6, 160)]
    known.update({"a": stats(11.05, requests=2, queued_s=2.0, costs=PrefillCosts(0.002, 0.0))})
    assert queued_s(known, 11.05) == pytest.approx(2.0 + 0.4), "the report may lack it, and has new costs"
    known.close("r")
    assert queued_s(known, 11.05) == 2.0


def test_a_request_that_went_elsewhere_counts_there_by_that_replicas_costs() -> None:
    known = fleet(a=stats(10.0, costs=COSTS), b=stats(10.0, costs=PrefillCosts(0.002, 0.0)))
    known.open("r")
    known.place("r", "b", 200, (), 11.0, cached=Found(100))
    known.confirm("r", "a", 11.0)
    loads = known.predicted_loads(["b", "a"], 11.0)
    assert loads is not None
    assert [load.queued_s for load in loads] == [0.0, COSTS.seconds(100, 300)]


def test_replicas_are_compared_by_time_only_if_each_has_reported_its_costs() -> None:
    known = fleet(a=stats(10.0, costs=COSTS), b=stats(10.0, queued=5))
    known.update({"a": stats(10.0, costs=COSTS), "b": stats(10.0, queued=5), "c": {}})
    for names in (["a", "b"], ["a", "c"], ["c"], ["a", "unknown"]):
        assert known.predicted_loads(names, 10.0) is None
    assert known.predicted_loads(["a"], 10.0) == [PredictedLoad(0, 0.0, 0.001, 1e-6, 400)]
    known.update({"a": stats(11.0, queued=7)})
    assert known.predicted_loads(["a"], 11.0) is None, "an engine of another configuration may follow"


def test_the_end_of_a_request_takes_its_tokens_out_of_a_queue_that_others_were_added_to_meanwhile() -> None:
    known = fleet(a=stats(10.0, queued=300, rate=100, free_blocks=50))
    for attempt, tokens, now in (("r1", 200, 11.0), ("r2", 40, 12.0)):
        known.open(attempt)
        known.place(attempt, "a", tokens, (), now)
    assert known.load("a", 12.5) == ReplicaLoad(2, 300 - 100 + 200 - 100 + 40 - 50, 0)
    known.close("r1")
    assert known.load("a", 12.5) == ReplicaLoad(1, 300 - 200 + 40 - 50, 50 * BLOCK_SIZE - 40)
    assert known.loads(["b", "a"], 12.5) == [known.load("b", 12.5), known.load("a", 12.5)]


def test_a_request_that_was_sent_elsewhere_than_placed_counts_there_alone() -> None:
    known = fleet(a={}, b={})
    known.open("r")
    known.place("r", "a", 100, KEYS, now=1.0)
    known.confirm("r", "b", now=1.0)
    assert (known.load("a", NOW), known.load("b", NOW)) == (ReplicaLoad(), ReplicaLoad(1, 100))
    assert known.cached_tokens("b", KEYS).num_cached == 2 * BLOCK_SIZE


def test_a_request_that_nobody_will_see_end_is_not_counted() -> None:
    known = fleet(a={})
    known.place("never opened", "a", 100, KEYS, now=1.0)
    assert known.load("a", NOW) == ReplicaLoad()


def test_a_replica_that_is_gone_is_forgotten_with_all_that_was_sent_there() -> None:
    known = fleet(a=stats(1.0, *KEYS, requests=3, cached=2), b={})
    known.open("r")
    known.place("r", "a", 100, KEYS, now=2.0)
    known.update({"b": {}})
    assert known.load("a", NOW) == ReplicaLoad()
    assert known.cached_tokens("a", KEYS).num_cached == 0
    known.update({"a": {}, "b": {}})
    known.close("r")
    assert known.load("a", NOW) == ReplicaLoad(), "the end of its request no longer counts anywhere"


def test_an_old_replica_that_speaks_another_format_is_one_without_a_report() -> None:
    """Two versions meet in a rolling update; an exception here would end Serve's updates of the router."""
    known = fleet(a={**stats(1.0, requests=3), "format": 0}, b={"whatever": 1})
    assert known.load("a", NOW) == known.load("b", NOW) == ReplicaLoad()


def test_a_report_brings_prefixes_and_takes_evicted_ones_away() -> None:
    known = fleet(a=stats(1.0, *KEYS, cached=2))
    assert known.cached_tokens("a", KEYS).num_cached == 2 * BLOCK_SIZE
    known.update({"a": stats(2.0, KEYS[0], cached=1)})
    assert known.cached_tokens("a", KEYS).num_cached == BLOCK_SIZE


names = st.sampled_from("abc")
attempts = st.integers(0, 5).map(str)
acts = (
    st.tuples(st.just("open"), attempts, names)
    | st.tuples(st.just("place"), attempts, names)
    | st.tuples(st.just("confirm"), attempts, names)
    | st.tuples(st.just("close"), attempts, names)
    | st.tuples(st.just("report"), attempts, names)
    | st.tuples(st.just("forget"), attempts, names)
)


@settings(deadline=None)
@given(life=st.lists(acts, max_size=60))
def test_when_all_requests_have_ended_an_idle_fleet_has_no_load_whatever_happened(
    life: list[tuple[str, str, str]],
) -> None:
    """No kind of attempt may leave a trace, which would turn requests away from a replica for ever."""
    known, live = Fleet(BLOCK_SIZE, 10), {"a", "b", "c"}
    for now, (act, attempt, name) in enumerate(life):
        match act:
            case "open":
                known.close(attempt)
                known.open(attempt)
            case "place":
                known.place(attempt, name, 10, KEYS, now)
            case "confirm":
                known.confirm(attempt, name, now)
            case "close":
                known.close(attempt)
            case "report":
                known.update({one: stats(now - 2 * (one == name)) for one in sorted(live)})
            case "forget":
                known.forget(name)
        for one in live:
            load = known.load(one, NOW)
            assert load.num_requests >= 0
            assert load.num_queued_tokens == 10 * load.num_requests
    for attempt in map(str, range(6)):
        known.close(attempt)
    assert {(known.load(one, NOW).num_requests, known.load(one, NOW).num_queued_tokens) for one in live} == {(0, 0)}


def test_the_engines_load_is_that_of_all_that_have_reported() -> None:
    known = fleet(a={}, b={})
    assert known.engine_load() is None
    known.update({"a": stats(4.0, requests=3, waiting=2, free_blocks=20), "b": {}})
    assert known.engine_load() == EngineLoad(0.8, 2)
    known.update({"a": stats(4.0), "b": stats(5.0, requests=5, waiting=1, free_blocks=60)})
    assert known.engine_load() == EngineLoad(0.6, 3)
    known.update({})
    assert known.engine_load() is None
