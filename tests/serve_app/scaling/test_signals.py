"""What an engine replica tells the autoscaler: each number is compared with a series of requests written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.protocol import (
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    LoadSnapshot,
    PrefillCosts,
    Scheduled,
    Token,
    Usage,
)
from serve_app.scaling.signals import ATTAINMENT_WINDOW_S, OFFERED_WINDOW_S, EngineReport, EngineSignals
from serve_app.settings.scaling import SignalSettings
from tests.support.engines import resolved_config
from tests.support.fleet import NUM_BLOCKS, load_snapshot

USAGE = Usage(1, 1, 0)


class Life:
    """An engine's signals and the clock that they read."""

    def __init__(self, step_tokens: int = 100) -> None:
        self.now_s = 1000.0
        settings = SignalSettings(ttft_target_ms=1000, prefill_tokens_per_s=500)
        self.signals = EngineSignals(
            settings, max_num_seqs=8, step_tokens=step_tokens, block_size=16, clock=lambda: self.now_s
        )

    def serve(self, name: str, prompt_tokens: int, ttft_s: float, cached_tokens: int = 0) -> None:
        self.signals.submitted(name, prompt_tokens)
        self.signals.observe([Scheduled(name, cached_tokens)])
        self.now_s += ttft_s
        self.signals.observe([Token(name, 1)])

    def report(self) -> EngineReport:
        return self.signals.report(load_snapshot())


def test_an_engine_without_requests_reports_no_load_full_attainment_and_the_default_throughput() -> None:
    report = Life().report()
    assert (report.num_running, report.offered_prefill_tokens_per_s, report.kv_pressure) == (0, 0, 0)
    assert (report.num_judged, report.ttft_attainment, report.prefill_tokens_per_s) == (0, 1.0, 500)


def test_an_engine_of_ranks_with_requests_of_their_own_is_full_once_all_their_seats_are_taken() -> None:
    """Its number of running requests is a sum over the ranks."""
    config = resolved_config(max_num_seqs=8, expert_parallel_size=4)
    report = EngineSignals.of(SignalSettings(), config).report(load_snapshot(num_running=8))
    assert report.num_running / report.max_num_seqs == 0.25


def test_stats_survive_the_trip_to_the_controller_and_lack_nothing() -> None:
    stats = Life().report().as_stats()
    assert all(isinstance(value, (int, float)) for value in stats.values())
    assert EngineReport.from_stats(stats) == EngineReport(**stats)
    for name in stats:
        assert EngineReport.from_stats({key: value for key, value in stats.items() if key != name}) is None
        assert EngineReport.from_stats(stats | {name: float("nan")}) is None


def test_an_engine_is_idle_since_its_last_request_ended_and_not_at_all_while_one_is_open() -> None:
    life = Life()
    life.now_s += 7
    assert life.signals.idle_s() == 7
    with life.signals.in_use():
        with life.signals.in_use():
            life.now_s += 1
        assert life.signals.idle_s() is None
    life.now_s += 2
    assert life.signals.idle_s() == 2


def test_an_engine_says_that_it_was_asked_to_sleep_until_a_request_comes() -> None:
    life = Life()
    assert life.report().asked_to_sleep == 0
    assert life.signals.sleep_if_idle()
    assert life.report().asked_to_sleep == 1
    with life.signals.in_use():
        assert life.report().asked_to_sleep == 0
        assert not life.signals.sleep_if_idle(), "it has a request"
        assert life.report().asked_to_sleep == 0
    assert life.report().asked_to_sleep == 0, "it was used since"


COSTS = PrefillCosts(token_s=0.001, pair_s=1e-5)


def predicting(load: LoadSnapshot, queued_s: float = 0.0) -> LoadSnapshot:
    return replace(load, queued_prefill_s=queued_s, prefill_costs=COSTS)


def test_predicted_seconds_are_reported_only_by_an_engine_that_predicts() -> None:
    life = Life()
    stats = life.signals.report(predicting(load_snapshot(), 1.5)).as_stats()
    assert (stats["queued_prefill_s"], stats["offered_prefill_s_per_s"]) == (1.5, 0)
    assert EngineReport.from_stats(stats) == life.signals.report(predicting(load_snapshot(), 1.5))
    report = life.report()
    assert not {"queued_prefill_s", "offered_prefill_s_per_s"} & report.as_stats().keys()
    assert (report.queued_prefill_s, report.offered_prefill_s_per_s) == (None, None)


def test_offered_seconds_are_those_of_each_prompt_without_its_cached_part() -> None:
    """The last tokens of a long prompt attend to all of it, cached or not."""
    life = Life()
    for name, cached_tokens in (("whole", 0), ("cached", 600)):
        life.signals.submitted(name, 1000, costs=COSTS)
        life.signals.observe([Scheduled(name, cached_tokens), Token(name, 1)])
    offered = COSTS.seconds(0, 1000) + COSTS.seconds(600, 1000)
    report = life.signals.report(predicting(load_snapshot()))
    assert report.offered_prefill_s_per_s == pytest.approx(offered / OFFERED_WINDOW_S)
    assert offered > 1400 * COSTS.token_s * 3
    life.now_s += OFFERED_WINDOW_S + 1
    assert life.signals.report(predicting(load_snapshot())).offered_prefill_s_per_s == 0


def test_load_is_as_predicted_or_else_by_the_measured_rate() -> None:
    report = replace(Life().report(), queued_prefill_tokens=1000, offered_prefill_tokens_per_s=250)
    assert (report.queue_s, report.offered_load) == (2.0, 0.5)
    predicted = replace(report, queued_prefill_s=5.0, offered_prefill_s_per_s=0.9)
    assert (predicted.queue_s, predicted.offered_load) == (5.0, 0.9)


def test_requests_that_wait_in_ingress_replicas_are_known_until_those_are_silent_for_long() -> None:
    life = Life()
    life.signals.submitted("a", 10, "first", 7)
    life.signals.submitted("b", 10, "first", 3)
    life.now_s += 10
    life.signals.submitted("c", 10, "second", 2)
    assert life.report().num_waiting_outside == 5
    life.now_s += ATTAINMENT_WINDOW_S - 5
    assert life.report().num_waiting_outside == 2


def test_blocks_that_may_be_evicted_are_free_and_reserved_ones_are_not() -> None:
    load = load_snapshot(num_held_blocks=300, num_reserved_blocks=200, num_evictable_blocks=400)
    report = Life().signals.report(load)
    assert report.kv_pressure == 500 / NUM_BLOCKS
    assert report.kv_capacity_tokens == NUM_BLOCKS * 16


def test_pressure_is_at_most_one() -> None:
    report = Life().signals.report(load_snapshot(num_held_blocks=NUM_BLOCKS, num_reserved_blocks=NUM_BLOCKS))
    assert report.kv_pressure == 1


def test_attainment_is_the_share_of_first_tokens_in_time() -> None:
    life = Life()
    for name, ttft_s in (("a", 0.5), ("b", 1.0), ("c", 1.5), ("d", 0.2)):
        life.serve(name, 100, ttft_s)
    assert (life.report().num_judged, life.report().ttft_attainment) == (4, 0.75)


def test_later_tokens_of_a_request_are_not_judged_again() -> None:
    life = Life()
    life.serve("a", 100, 0.5)
    life.now_s += 5
    life.signals.observe([Token("a", 2), Token("a", 3), Finished("a", FinishReason.LENGTH, USAGE)])
    life.signals.ended("a")
    assert (life.report().num_judged, life.report().ttft_attainment) == (1, 1.0)


def test_what_happened_before_the_window_is_forgotten() -> None:
    life = Life()
    life.serve("a", 100, 2)
    life.now_s += ATTAINMENT_WINDOW_S + 1
    assert (life.report().num_judged, life.report().ttft_attainment) == (0, 1.0)


def test_a_request_that_waits_past_the_target_is_missed_while_it_waits_and_once_when_it_is_served() -> None:
    life = Life()
    life.signals.submitted("a", 100)
    life.now_s += 1
    assert life.report().num_judged == 0
    life.now_s += 1
    assert (life.report().num_judged, life.report().ttft_attainment) == (1, 0.0)
    life.signals.observe([Scheduled("a", 0), Token("a", 1)])
    assert (life.report().num_judged, life.report().ttft_attainment) == (1, 0.0)


@pytest.mark.parametrize(
    "end", [Finished("a", FinishReason.ABORT, USAGE), Failed("a", ErrorCode.STEP_FAILED, "")], ids=["abort", "failure"]
)
@pytest.mark.parametrize(("after_s", "judged"), [(0.5, 0), (3.0, 1)])
def test_a_request_that_ends_without_an_answer_is_missed_only_if_it_was_late(
    end: Finished | Failed, after_s: float, judged: int
) -> None:
    life = Life()
    life.signals.submitted("a", 100)
    life.now_s += after_s
    life.signals.observe([end])
    life.signals.ended("a")
    assert life.report().num_judged == judged
    assert life.report().ttft_attainment == 1.0 - judged


def test_a_prompt_that_no_idle_engine_computes_in_time_may_take_twice_its_own_time() -> None:
    """Regression: more replicas were asked for where prompts alone took longer than the target,
    and none of them helped."""
    life = Life()
    life.serve("measures 500 a second", prompt_tokens=250, ttft_s=0.5)
    life.serve("long", prompt_tokens=1000, ttft_s=3.9)
    assert (life.report().num_judged, life.report().ttft_attainment) == (2, 1.0)
    life.serve("waited", prompt_tokens=1000, ttft_s=4.1)
    assert (life.report().num_judged, life.report().ttft_attainment) == (3, pytest.approx(2 / 3))
    life.serve("short", prompt_tokens=400, ttft_s=1.1)
    assert life.report().ttft_attainment == 0.5


def test_what_the_cache_has_of_a_prompt_takes_no_time() -> None:
    life = Life()
    life.serve("measures 500 a second", prompt_tokens=250, ttft_s=0.5)
    life.serve("long and known", prompt_tokens=1000, ttft_s=1.1, cached_tokens=900)
    assert life.report().ttft_attainment == 0.5


def test_a_long_prompt_that_waits_is_missed_once_it_waited_for_longer_than_it_may() -> None:
    life = Life()
    life.serve("measures 500 a second", prompt_tokens=250, ttft_s=0.5)
    life.signals.submitted("long", 1000)
    life.signals.submitted("short", 100)
    life.now_s += 3.9
    assert life.report().num_judged == 2  # the one before, and the short one behind the long one
    life.now_s += 0.2
    assert life.report().num_judged == 3


def test_an_engine_slowed_by_its_load_is_still_held_to_what_it_does_without() -> None:
    life = Life()
    life.serve("alone", prompt_tokens=1000, ttft_s=0.5)
    for number in range(20):
        life.serve(f"beside many streams {number}", prompt_tokens=1000, ttft_s=2.5)
    assert life.report().prefill_tokens_per_s < 600
    assert life.report().ttft_attainment < 0.1


def test_a_prompt_that_is_only_scored_has_its_answer_when_it_finishes() -> None:
    life = Life()
    life.signals.submitted("a", 100)
    life.now_s += 0.5
    life.signals.observe([Scheduled("a", 0), Finished("a", FinishReason.LENGTH, USAGE)])
    assert (life.report().num_judged, life.report().ttft_attainment) == (1, 1.0)


def test_a_refused_request_is_missed_and_its_prompt_was_offered() -> None:
    life = Life()
    life.signals.submitted("a", 2000)
    life.signals.refused("a")
    life.signals.ended("a")
    report = life.report()
    assert (report.num_judged, report.ttft_attainment) == (1, 0.0)
    assert report.offered_prefill_tokens_per_s == 2000 / OFFERED_WINDOW_S


def test_a_caller_who_leaves_is_forgotten() -> None:
    life = Life()
    life.signals.submitted("a", 100)
    life.signals.ended("a")
    life.now_s += 60
    assert life.report().num_judged == 0


def test_offered_tokens_are_those_that_the_cache_does_not_have() -> None:
    life = Life()
    life.serve("a", 1000, 0.1, cached_tokens=600)
    assert life.report().offered_prefill_tokens_per_s == 400 / OFFERED_WINDOW_S


def test_a_cached_prompt_that_left_the_window_before_its_hit_was_known_offers_nothing() -> None:
    life = Life()
    life.signals.submitted("a", 1000)
    life.now_s += OFFERED_WINDOW_S + 1
    life.signals.observe([Scheduled("a", 900)])
    assert life.report().offered_prefill_tokens_per_s == 0


def test_throughput_is_what_was_computed_while_prompts_waited_not_over_idle_time() -> None:
    life = Life()
    for n in range(5):
        life.serve(f"{n}", 300, 0.25)
        life.now_s += 100
    assert life.report().prefill_tokens_per_s == pytest.approx(1200)


def test_throughput_of_requests_side_by_side_is_that_of_all_together() -> None:
    life = Life()
    life.signals.submitted("a", 400)
    life.signals.submitted("b", 400)
    for name in "ab":
        life.now_s += 0.5
        life.signals.observe([Token(name, 1)])
    assert life.report().prefill_tokens_per_s == pytest.approx(800)


def test_a_lone_short_prompt_does_not_measure_throughput() -> None:
    life = Life(step_tokens=100)
    life.serve("a", 10, 0.05)
    assert life.report().prefill_tokens_per_s == 500
    for n in range(12):  # in a stretch without a gap they do
        life.signals.submitted(f"{n}", 10)
    life.now_s += 0.5
    life.signals.observe([Token(f"{n}", 1) for n in range(12)])
    assert life.report().prefill_tokens_per_s == pytest.approx(200)


def test_throughput_follows_a_change() -> None:
    life = Life()
    for n in range(100):
        life.serve(f"fast-{n}", 1000, 1)
    for n in range(200):
        life.serve(f"slow-{n}", 100, 1)
    assert life.report().prefill_tokens_per_s == pytest.approx(100, rel=0.5)


def test_cached_tokens_are_no_throughput() -> None:
    life = Life()
    life.serve("a", 1000, 1, cached_tokens=800)
    assert life.report().prefill_tokens_per_s == pytest.approx(200)


def test_throughput_is_never_below_one_token_a_second() -> None:
    life = Life()
    life.serve("a", 100, 1e6)
    assert life.report().prefill_tokens_per_s == 1


def test_a_long_life_keeps_nothing_of_its_requests() -> None:
    life = Life()
    for n in range(2000):
        life.serve(f"{n}", 100, 0.7)
    sizes = [len(window._counts) for window in (life.signals._offered, life.signals._judged, life.signals._in_time)]
    assert max(sizes) <= ATTAINMENT_WINDOW_S
    assert not life.signals._waiting
