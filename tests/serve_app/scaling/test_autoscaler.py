"""How many replicas a load needs. Long: properties of single decisions, then a fleet on a virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app.scaling.autoscaler import Autoscaler, Decision, Observation, steady_terms
from serve_app.scaling.memory import StampedReport, Trend
from serve_app.scaling.signals import ATTAINMENT_WINDOW_S, EngineReport
from serve_app.settings.application import AppSettings
from serve_app.settings.scaling import AutoscalingSettings, ScalingSettings
from tests.support.fleet import Fleet, Shape, direction_changes

IDLE = EngineReport(
    num_running=0,
    num_waiting=0,
    max_num_seqs=10,
    queued_prefill_tokens=0,
    prefill_tokens_per_s=1000,
    offered_prefill_tokens_per_s=0,
    kv_pressure=0,
    kv_capacity_tokens=16000,
    num_judged=0,
    ttft_attainment=1,
)
QUICK = ScalingSettings(upscale_delay_s=0, downscale_delay_s=60, startup_time_s=0)


class Deployment:
    """A deployment whose replicas run as soon as they are asked for, unless a test says otherwise."""

    def __init__(self, options: ScalingSettings = QUICK, *, target: int = 1, low: int = 1, high: int = 10) -> None:
        self.autoscaler = Autoscaler(options)
        self.now_s, self.target, self.bounds = 0.0, target, (low, high)
        self.history = [target]

    def decide(
        self, reports: Sequence[EngineReport | None], *, router_queued: float = 0, stamp: float | None = None
    ) -> Decision:
        running = {
            f"replica-{index}": StampedReport(self.now_s if stamp is None else stamp, report) if report else None
            for index, report in enumerate(reports)
        }
        return self.autoscaler.decide(Observation(self.now_s, running, self.target, router_queued, *self.bounds))

    def step(
        self, reports: Sequence[EngineReport | None], *, router_queued: float = 0, stamp: float | None = None
    ) -> int:
        """Let a second pass, and carry the decision out."""
        self.now_s += 1
        self.target = self.decide(reports, router_queued=router_queued, stamp=stamp).num_replicas
        self.history.append(self.target)
        return self.target

    def carry(self, load: EngineReport, seconds: int) -> int:
        """Let the fleet share a whole load evenly for so many seconds."""
        for _ in range(seconds):
            self.step(shared(load, self.target))
        return self.target


def shared(load: EngineReport, replicas: int) -> list[EngineReport]:
    """Spread a whole fleet's load evenly; seats and throughput are each engine's own."""
    part = replace(
        load,
        num_running=min(load.max_num_seqs, load.num_running / max(1, replicas)),
        num_waiting=load.num_waiting / max(1, replicas),
        queued_prefill_tokens=load.queued_prefill_tokens / max(1, replicas),
        offered_prefill_tokens_per_s=load.offered_prefill_tokens_per_s / max(1, replicas),
        kv_pressure=min(1.0, load.kv_pressure / max(1, replicas)),
    )
    return [part] * replicas


def seats(count: float) -> EngineReport:
    """Return a whole load of running requests."""
    return replace(IDLE, num_running=count)


REPORTS = st.builds(
    EngineReport,
    num_running=st.integers(0, 10),
    num_waiting=st.integers(0, 100),
    max_num_seqs=st.just(10),
    queued_prefill_tokens=st.integers(0, 50_000),
    prefill_tokens_per_s=st.sampled_from([200.0, 1000.0]),
    offered_prefill_tokens_per_s=st.integers(0, 3000),
    kv_pressure=st.floats(0, 1),
    kv_capacity_tokens=st.just(16_000),
    num_judged=st.integers(1, 50),
    ttft_attainment=st.floats(0, 1),
)
MAYBE_REPORTS = st.lists(st.one_of(st.none(), REPORTS), min_size=1, max_size=6)
SOME_SETTINGS = st.builds(
    ScalingSettings,
    upscale_delay_s=st.sampled_from([0, 2]),
    downscale_delay_s=st.sampled_from([0, 3, 20]),
    downscale_to_zero_delay_s=st.sampled_from([0, 5]),
    startup_time_s=st.sampled_from([0, 10, 60]),
    max_growth=st.sampled_from([1.2, 2.0, 4.0]),
    downscale_step=st.sampled_from([0.1, 0.5, 1.0]),
)


@st.composite
def lived(draw: st.DrawFn) -> tuple[Deployment, list[EngineReport]]:
    """Return a deployment with any past, and current reports."""
    low = draw(st.integers(0, 2))
    deployment = Deployment(draw(SOME_SETTINGS), target=draw(st.integers(1, 8)), low=low, high=draw(st.integers(3, 9)))
    for reports in draw(st.lists(MAYBE_REPORTS, max_size=8)):
        pause = draw(st.sampled_from([1, 1, 4, 21, 40]))
        for _ in range(pause):
            deployment.step(reports, router_queued=draw(st.sampled_from([0, 0, 5])))
    return deployment, draw(st.lists(REPORTS, min_size=1, max_size=6))


@given(lived(), st.data())
@settings(deadline=None, max_examples=100)
def test_more_load_never_gives_fewer_replicas(case: tuple[Deployment, list[EngineReport]], data: st.DataObject) -> None:
    deployment, reports = case
    index = data.draw(st.integers(0, len(reports) - 1))
    less = reports[index]
    more = replace(
        less,
        num_running=data.draw(st.integers(int(less.num_running), 10)),
        num_waiting=data.draw(st.integers(int(less.num_waiting), 200)),
        queued_prefill_tokens=data.draw(st.integers(int(less.queued_prefill_tokens), 60_000)),
        offered_prefill_tokens_per_s=data.draw(st.integers(int(less.offered_prefill_tokens_per_s), 4000)),
        kv_pressure=data.draw(st.floats(less.kv_pressure, 1)),
        ttft_attainment=data.draw(st.floats(0, less.ttft_attainment)),
    )
    queued = data.draw(st.integers(0, 20))
    twin = deepcopy(deployment)
    deployment.now_s += 1
    twin.now_s += 1
    before = deployment.decide(reports, router_queued=queued).num_replicas
    after = twin.decide([*reports[:index], more, *reports[index + 1 :]], router_queued=queued + 3).num_replicas
    assert after >= before


@given(lived())
@settings(deadline=None, max_examples=30)
def test_a_decision_is_always_within_the_bounds(case: tuple[Deployment, list[EngineReport]]) -> None:
    deployment, _ = case
    low, high = deployment.bounds
    assert all(low <= number <= high for number in deployment.history[1:])


@given(lived(), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_nothing_is_removed_while_a_running_replica_does_not_report(
    case: tuple[Deployment, list[EngineReport]], silent: int
) -> None:
    deployment, reports = case
    deployment.target = min(deployment.bounds[1], max(deployment.target, len(reports) + 1))
    for _ in range(30):
        before = deployment.target
        assert deployment.step([*reports[:silent], None, *reports[silent:]]) >= before


def test_reports_that_are_not_renewed_are_stale_and_nothing_is_removed() -> None:
    deployment = Deployment(target=4)
    for _ in range(500):
        deployment.step([IDLE] * 4, stamp=7.0)
    assert deployment.target >= 4
    assert deployment.carry(IDLE, 400) == 1


def test_a_replica_whose_clock_is_hours_behind_is_not_stale() -> None:
    deployment = Deployment(target=2)
    for second in range(100):
        deployment.step([IDLE] * deployment.target, stamp=second - 7200.0)
    assert deployment.target == 1


def test_a_silent_replica_counts_as_full() -> None:
    deployment = Deployment(target=2)
    busy = seats(6.5)  # of one replica's 7
    for _ in range(60):
        deployment.step([busy, None])
    assert deployment.target == 2
    for _ in range(5):
        deployment.step([seats(10), None])
    assert deployment.target == 3


def test_a_replica_that_has_just_started_does_not_call_for_another() -> None:
    deployment = Deployment(target=2)
    assert deployment.step([seats(10), None]) == 2


@given(st.floats(0.1, 9.5), st.integers(1, 10))
@settings(deadline=None, max_examples=15)
def test_a_constant_load_settles_and_stays(need: float, start: int) -> None:
    deployment = Deployment(target=start)
    settled = deployment.carry(seats(need * 7), 800)
    assert settled >= need - 1e-6
    assert deployment.carry(seats(need * 7), 800) == settled
    assert len(set(deployment.history[-800:])) == 1
    assert direction_changes(deployment.history) == 0


@given(st.floats(0.3, 8.0), st.integers(0, 10**6))
@settings(deadline=None, max_examples=8)
def test_noise_of_a_tenth_does_not_make_it_swing(need: float, seed: int) -> None:
    noise = random.Random(seed)
    deployment = Deployment(ScalingSettings(downscale_delay_s=60, upscale_delay_s=0))
    for _ in range(1500):
        deployment.carry(seats(need * 7 * noise.uniform(0.9, 1.1)), 1)
    assert direction_changes(deployment.history) == 0


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 150)), min_size=2, max_size=6))
@settings(deadline=None, max_examples=20)
def test_after_every_step_down_the_rest_is_below_its_targets(loads: list[tuple[float, int]]) -> None:
    deployment = Deployment()
    for need, seconds in loads:
        for _ in range(seconds):
            before = deployment.target
            if deployment.carry(seats(need * 7), 1) < before:
                after = steady_terms(QUICK, shared(seats(need * 7), deployment.target))
                assert max(after.values()) <= deployment.target * (1 - QUICK.downscale_margin) + 1e-6


def test_a_step_down_removes_no_more_than_its_share_and_waits_again() -> None:
    deployment = Deployment(target=8)
    deployment.carry(IDLE, 400)
    numbers = [
        number for number, last in zip(deployment.history[1:], deployment.history, strict=False) if number < last
    ]
    assert numbers == [6, 5, 4, 3, 2, 1]
    first = deployment.history.index(6)
    assert deployment.history.index(5) - first > QUICK.downscale_delay_s


def test_a_step_down_leaves_enough_for_the_busiest_moment_of_the_delay() -> None:
    deployment = Deployment(QUICK.model_copy(update={"downscale_step": 1.0}), target=8)
    deployment.carry(IDLE, 30)
    deployment.carry(seats(4 * 7), 1)
    deployment.carry(IDLE, 35)
    assert deployment.target == 5


def test_one_busy_moment_starts_the_delay_of_a_step_down_again() -> None:
    deployment = Deployment(target=2)
    for _ in range(10):
        deployment.carry(IDLE, 50)
        deployment.carry(seats(13), 1)
    assert deployment.target == 2


@pytest.mark.parametrize(
    "load",
    [
        seats(10),
        replace(IDLE, offered_prefill_tokens_per_s=1400),
        replace(IDLE, queued_prefill_tokens=40_000),
        replace(IDLE, kv_pressure=0.9),
        replace(IDLE, num_running=10, num_waiting=20),
    ],
    ids=["running", "offered prefill", "queued prefill", "KV", "waiting"],
)
def test_each_kind_of_load_calls_for_a_second_replica(load: EngineReport) -> None:
    assert Deployment().step([load]) == 2


def test_requests_at_the_router_call_for_replicas() -> None:
    assert Deployment().step([seats(6)], router_queued=1) == 1
    told = [replace(seats(6), num_waiting_outside=5)] * 2
    assert Deployment(target=2).step(told) == 3, "each engine knows of all that wait outside: they are counted once"
    assert Deployment().step([seats(6)], router_queued=5) == 2


def test_queued_tokens_weigh_what_they_take_to_compute() -> None:
    queue = replace(IDLE, queued_prefill_tokens=40_000)
    assert Deployment().step([replace(queue, prefill_tokens_per_s=20_000)]) == 1
    assert Deployment().step([replace(queue, prefill_tokens_per_s=1000)]) == 2


def test_where_engines_predict_time_counts_and_not_tokens() -> None:
    """A long prompt costs more than its tokens: by the measured rate of short ones, either load would fit."""
    short = replace(IDLE, offered_prefill_tokens_per_s=600, queued_prefill_tokens=500)
    assert Deployment().step([short]) == 1
    fits = replace(short, offered_prefill_s_per_s=0.6, queued_prefill_s=0.5)
    assert Deployment().step([fits]) == 1
    assert Deployment().step([replace(fits, offered_prefill_s_per_s=1.4)]) == 2
    assert Deployment().step([replace(fits, queued_prefill_s=40.0)]) == 2


def test_predictions_can_call_for_fewer_replicas_than_tokens() -> None:
    many = replace(IDLE, offered_prefill_tokens_per_s=1400, queued_prefill_tokens=40_000)
    assert Deployment().step([many]) == 2
    assert Deployment().step([replace(many, offered_prefill_s_per_s=0.3, queued_prefill_s=0.2)]) == 1


def test_a_slower_engine_calls_for_more_replicas_at_the_same_rate_of_tokens() -> None:
    """Its noisy neighbour came after the rate was measured over minutes."""

    def target(speed: float) -> int:
        load = replace(
            IDLE, offered_prefill_tokens_per_s=1000, offered_prefill_s_per_s=1.0 / speed, queued_prefill_s=0.0
        )
        return Deployment().step([load])

    assert [target(speed) for speed in (2.0, 1.0, 0.5)] == [1, 2, 3]


def test_engines_that_predict_and_others_are_added_up() -> None:
    """In a rolling update both report."""
    old = replace(IDLE, offered_prefill_tokens_per_s=700)
    new = replace(IDLE, offered_prefill_tokens_per_s=9999, offered_prefill_s_per_s=0.7, queued_prefill_s=0.0)
    assert steady_terms(QUICK, [old, new])["offered prefill"] == pytest.approx(1.4 / QUICK.target_utilization)


def test_replicas_that_are_starting_are_not_asked_for_again() -> None:
    deployment = Deployment()
    overload = replace(IDLE, num_running=10, num_waiting=9, offered_prefill_tokens_per_s=1800)
    first = deployment.step([overload])
    assert first == 3
    for _ in range(600):  # they take ten minutes to start
        assert deployment.step([overload]) == first


def test_starting_replicas_are_not_given_up_while_the_running_ones_are_full() -> None:
    deployment = Deployment(target=6)
    for _ in range(600):
        deployment.step([seats(10), seats(10)])
    assert deployment.target == 6


def test_waiting_work_asks_for_a_multiple_of_what_runs_and_no_more() -> None:
    mountain = replace(IDLE, num_running=10, num_waiting=5000, queued_prefill_tokens=10**7)
    assert Deployment(target=2, high=100).step([mountain] * 2) == 4


def test_more_load_must_last_for_the_upscale_delay() -> None:
    deployment = Deployment(ScalingSettings(upscale_delay_s=3, startup_time_s=0))
    for _ in range(5):
        assert deployment.carry(seats(13), 3) == 1
        assert deployment.carry(seats(3), 1) == 1
    assert deployment.carry(seats(13), 4) == 2


def test_only_the_lasting_part_of_a_peak_in_the_upscale_delay_counts() -> None:
    deployment = Deployment(ScalingSettings(upscale_delay_s=3, startup_time_s=0), target=4)
    deployment.step([seats(8)] * 4)
    deployment.step([replace(seats(10), num_waiting=20)] * 4)
    deployment.carry(seats(8 * 4), 3)
    assert deployment.target == 5


# --- time to first token ----------------------------------------------------------------------------------------------


def missed(load: float, attainment: float) -> EngineReport:
    return replace(seats(load), num_judged=100, ttft_attainment=attainment)


def test_missed_first_tokens_add_a_replica_though_every_target_is_met() -> None:
    deployment = Deployment()
    for _ in range(ATTAINMENT_WINDOW_S + 2):
        deployment.step([missed(6, 0.6)])
    assert deployment.target == 2


def test_missed_first_tokens_of_an_idle_fleet_are_not_for_want_of_replicas() -> None:
    deployment = Deployment(target=2)
    for _ in range(200):
        deployment.step(shared(missed(0.48 * 7, 0.0), deployment.target))
    assert deployment.target == 1


def test_a_cured_miss_is_not_forgotten_when_the_load_is_as_it_was() -> None:
    """Otherwise the second replica goes, first tokens are late again, and so on for ever."""
    deployment = Deployment()
    for _ in range(1200):
        reports = [missed(6, 0.6)] if deployment.target == 1 else shared(missed(6, 1.0), deployment.target)
        deployment.step(reports)
    assert deployment.target == 2
    assert direction_changes(deployment.history) == 0


def test_misses_of_before_a_replica_came_teach_nothing() -> None:
    deployment = Deployment()
    deployment.step([seats(10)])
    assert deployment.target == 2
    for _ in range(ATTAINMENT_WINDOW_S - 2):
        deployment.step([missed(6, 0.0)] * 2)
    assert deployment.target == 2


def test_a_miss_at_little_load_does_not_raise_a_forecast_above_that_of_a_miss_at_more() -> None:
    deployment = Deployment(ScalingSettings(upscale_delay_s=0, startup_time_s=40), target=4, low=4)
    for second in range(100):
        deployment.step(shared(seats(7 * (0.8 + 0.016 * second)), 4))
    deployment.now_s += 1
    twin = deepcopy(deployment)
    less = deployment.decide([missed(7 * 2.4 / 4, 0.8)] * 4).num_replicas
    more = twin.decide([missed(7 * 3.9 / 4, 0.8)] * 4).num_replicas
    assert less <= more == 5


# --- none and one -----------------------------------------------------------------------------------------------------


def test_one_starts_at_once_when_a_request_waits_and_none_runs() -> None:
    deployment = Deployment(ScalingSettings(upscale_delay_s=30), target=0, low=0)
    assert deployment.step([]) == 0
    assert deployment.step([], router_queued=1) == 1
    for _ in range(1000):
        assert deployment.step([], router_queued=1) == 1, "it is starting"


def test_the_last_replica_goes_only_after_the_delay_without_any_request() -> None:
    deployment = Deployment(ScalingSettings(downscale_to_zero_delay_s=100, downscale_delay_s=5), low=0)
    for _ in range(5):
        deployment.carry(IDLE, 95)
        deployment.carry(replace(IDLE, offered_prefill_tokens_per_s=0.1), 1)  # a request between two reports
    assert deployment.target == 1
    deployment.carry(IDLE, 102)
    assert deployment.target == 0


ASKED = replace(IDLE, asked_to_sleep=1)


def test_replicas_that_are_asked_to_end_for_another_model_end_at_once_all_of_them() -> None:
    deployment = Deployment(ScalingSettings(downscale_to_zero_delay_s=1000, downscale_delay_s=1000), target=2, low=0)
    assert deployment.step([replace(ASKED, offered_prefill_tokens_per_s=9), ASKED]) == 0


@pytest.mark.parametrize(
    "busy", [{"num_running": 1}, {"num_waiting": 1}, {"num_waiting_outside": 1}, {"asked_to_sleep": 0}], ids=str
)
def test_no_replica_ends_for_another_model_while_one_has_a_request_or_was_not_asked(busy: dict[str, float]) -> None:
    deployment = Deployment(target=2, low=0)
    assert deployment.step([ASKED, replace(ASKED, **busy)]) == 2
    assert deployment.step([ASKED, None]) == 2, "one that does not report may be busy"
    assert deployment.step([ASKED, ASKED], router_queued=1) == 2


def test_a_model_that_may_not_sleep_ignores_that_it_is_asked_to() -> None:
    deployment = Deployment(target=2, low=1)
    assert deployment.step([ASKED, ASKED]) == 2


def test_a_replica_that_is_still_starting_is_not_given_up_for_want_of_requests() -> None:
    deployment = Deployment(ScalingSettings(downscale_to_zero_delay_s=10), target=1, low=0)
    for _ in range(100):
        assert deployment.step([]) == 1


def test_a_gap_in_the_calls_is_not_a_time_of_low_load() -> None:
    deployment = Deployment(target=2)
    deployment.carry(IDLE, 30)
    deployment.now_s += 3600
    assert deployment.carry(IDLE, 30) == 2


# --- the trend --------------------------------------------------------------------------------------------------------


def forecast_after(loads: Sequence[float]) -> float:
    trend = Trend(40, 10)
    for second, load in enumerate(loads):
        trend.add(second, load)
    return trend.forecast()


def test_a_ramp_is_extrapolated_over_the_horizon() -> None:
    assert forecast_after([0.1 * second for second in range(100)]) == pytest.approx(9.9 + 4, abs=0.6)


def test_a_step_is_not_taken_for_a_ramp_at_any_moment() -> None:
    for at in range(60):
        loads = [1.0] * (60 + at) + [9.0] * 60
        assert all(forecast_after(loads[:end]) <= 9.0 for end in range(60, len(loads)))


def test_a_falling_load_has_no_forecast() -> None:
    assert forecast_after([100 - second for second in range(100)]) == 0


def test_without_a_start_up_time_nothing_is_forecast() -> None:
    trend = Trend(0, 10)
    for second in range(200):
        trend.add(second, second)
    assert trend.forecast() == 0


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"min_replicas \(3\) is more than max_replicas \(2\)"):
        AutoscalingSettings(min_replicas=3, max_replicas=2)
    with pytest.raises(ValidationError, match=r"engine_replicas \(4\) is the number to start with"):
        AppSettings.model_validate({"engine_replicas": 4, "autoscaling": {"max_replicas": 3}})
    with pytest.raises(ValidationError, match="max_replica"):
        AppSettings.model_validate({"autoscaling": {"max_replicas": 3, "max_replica": 3}})


def test_engine_replicas_left_out_contradicts_nothing() -> None:
    settings = AppSettings.model_validate({"autoscaling": {"min_replicas": 2, "max_replicas": 3}})
    assert settings.most_engines == 3
    assert AppSettings(engine_replicas=2).most_engines == 2


# --- a fleet on a virtual clock ---------------------------------------------------------------------------------------

SIMULATED = ScalingSettings(startup_time_s=30, downscale_delay_s=120)


def served_all_but_the_last(fleet: Fleet) -> bool:
    return fleet.num_queued <= len(fleet.engines) * 3


@pytest.mark.parametrize("predicts", [False, True])
def test_a_step_is_served_by_as_many_as_it_needs_and_the_rest_goes(predicts: bool) -> None:
    fleet = Fleet(SIMULATED, shape=Shape(predicts=predicts)).run(200, lambda _: 1.0).run(600, lambda _: 8.0)
    assert fleet.worst_ttft_s() < 120, "what came before the new replicas did waits, for a bounded time"
    assert fleet.worst_ttft_s(since_s=500) <= 2, "a replica computes two prompts a second"
    assert served_all_but_the_last(fleet)
    assert 6 <= fleet.target <= 9
    assert max(fleet.targets) <= 12
    assert direction_changes(fleet.targets) <= 1


@pytest.mark.parametrize("predicts", [False, True])
def test_a_step_of_long_answers_is_served_too(predicts: bool) -> None:
    shape = Shape(answer_s=30, prompt_tokens=200, predicts=predicts)
    fleet = Fleet(SIMULATED, shape=shape).run(100, lambda _: 0.5).run(700, lambda _: 4.0)
    assert fleet.worst_ttft_s(since_s=500) <= 2
    assert 6 <= fleet.target <= 9, "120 requests in 22.4 seats each"
    assert direction_changes(fleet.targets) <= 1


def test_a_ramp_is_followed_without_a_queue() -> None:
    fleet = Fleet(SIMULATED).run(1200, lambda t: 1 + 7 * t / 1200)
    assert fleet.worst_ttft_s() <= 5
    assert served_all_but_the_last(fleet)
    assert fleet.target <= 8
    assert direction_changes(fleet.targets) == 0


def test_a_forecast_is_earlier_than_the_load_itself() -> None:
    def steep(t: float) -> float:
        return 1 + 7 * t / 400

    ahead = Fleet(SIMULATED).run(400, steep)
    behind = Fleet(SIMULATED.model_copy(update={"startup_time_s": 0})).run(400, steep)
    assert ahead.replica_seconds > behind.replica_seconds
    assert ahead.worst_ttft_s() <= behind.worst_ttft_s()


def test_a_spike_shorter_than_a_start_up_costs_few_replicas_and_they_go_again() -> None:
    fleet = Fleet(SIMULATED).run(100, lambda _: 1.0).run(10, lambda _: 8.0).run(600, lambda _: 1.0)
    assert max(fleet.targets) <= 5
    assert fleet.target == 1
    assert fleet.worst_ttft_s() < 45
    assert direction_changes(fleet.targets) == 1


def test_two_days_of_a_diurnal_load_are_two_waves() -> None:
    fleet = Fleet(SIMULATED).run(3600, lambda t: 4 - 3.5 * math.cos(2 * math.pi * t / 1800))
    assert fleet.worst_ttft_s() <= 6
    assert served_all_but_the_last(fleet)
    assert direction_changes(fleet.targets) == 3
    assert fleet.replica_seconds < 0.85 * 3600 * max(fleet.targets)


def test_a_fleet_of_none_wakes_serves_and_sleeps_again() -> None:
    options = SIMULATED.model_copy(update={"downscale_to_zero_delay_s": 200})
    fleet = Fleet(options, min_replicas=0).run(50, lambda _: 0).run(100, lambda _: 1.0).run(900, lambda _: 0)
    assert fleet.targets[:2] == [0, 1]
    assert (fleet.target, fleet.num_queued, len(fleet.ttfts_s)) == (0, 0, 100)
