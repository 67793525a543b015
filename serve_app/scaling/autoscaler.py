"""Computes how many engine replicas a load needs, with hysteresis that keeps the number stable.
Never reads a clock or calls Ray: it gets one moment's reports, and returns a number and its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.scaling.memory import Freshness, Lasting, LoadShare, Sorted, StampedReport, Trend
from serve_app.scaling.signals import ATTAINMENT_WINDOW_S, OFFERED_WINDOW_S, EngineReport
from serve_app.settings.scaling import ScalingSettings

_ROUNDING = 1e-9
"""A tolerance, so that sums of floats that should be whole numbers are not rounded up to the next one."""
RUNNING, OFFERED, KV = "running requests", "offered prefill", "KV blocks in use"
_FULL = 0.9
"""From this share on, seats or blocks count as what requests wait for; some are always free between two requests."""
_FORECAST_GROWTH = 2.0
"""A forecast is limited to this multiple of the present load."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that is known at one moment."""

    now_s: float
    """The time on a monotonic clock."""
    running: Mapping[str, StampedReport | None]
    """All running replicas, each with its last report if there is one."""
    target: int
    """The number of replicas requested so far, running or starting."""
    router_queued: float
    """How many requests have not reached an engine."""
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class Decision:
    num_replicas: int
    reason: str
    """The term that requires the most replicas."""
    need: float
    """The replicas that the load requires, before rounding and hysteresis."""
    num_stale: int
    """The number of running replicas without a recent report."""


class Autoscaler:
    """Holds the state of one deployment's scaling. Call `decide` several times a second.

    A need is a fractional number of replicas: the whole load divided by the load that one replica should have. It does
    not depend on how many are running, so replicas that are still starting are not requested again.
    """

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._freshness = Freshness(settings.stale_after_s)
        self._trend = Trend(settings.startup_time_s, OFFERED_WINDOW_S)
        self._share = LoadShare(settings.ttft_objective)
        self._more = Lasting(settings.upscale_delay_s, min)
        self._fewer = Lasting(settings.downscale_delay_s, max)
        self._none = Lasting(settings.downscale_to_zero_delay_s, max)
        self._last_s = -math.inf
        self._num_running = 0
        self._recovering, self._calm_since_s = True, -math.inf

    def decide(self, seen: Observation) -> Decision:
        """Decide the number of replicas, within the bounds. More load never leads to a smaller number."""
        self._note_time(seen)
        known = self._freshness.sort(seen.now_s, seen.running)
        need, reason = self._need(seen, known)
        # If none is running, there are no measurements, and no replica is removed.
        wanted = self._settled(seen, need, known) if seen.running else max(seen.target, int(seen.router_queued > 0))
        if _makes_room(seen, known.reports):
            wanted, reason = 0, "another model"
        return Decision(min(seen.max_replicas, max(seen.min_replicas, wanted)), reason, need, known.num_stale)

    def _note_time(self, seen: Observation) -> None:
        unseen = seen.now_s - self._last_s > self._settings.stale_after_s
        if unseen or not seen.running:  # it is unknown whether the need lasted
            for lasting in (self._more, self._fewer, self._none):
                lasting.end()
        self._last_s = seen.now_s

    def _need(self, seen: Observation, known: Sorted) -> tuple[float, str]:
        """Compute the need and the term that determines it. A replica without a recent report is assumed to be full."""
        terms = steady_terms(self._settings, known.reports)
        steady = max(terms.values())
        if known.reports and len(known.reports) == len(seen.running):
            self._trend.add(seen.now_s, steady)
        limit = self._settings.max_growth * len(seen.running)
        # Requests that wait in front of the engines may go to any of them, so each engine reports all of them.
        outside = seen.router_queued + max((report.num_waiting_outside for report in known.reports), default=0.0)
        waiting = waiting_terms(self._settings, known.reports, outside)
        terms |= {name: min(need, limit) for name, need in waiting.items()}
        reason = max(terms, key=terms.__getitem__)
        present = terms[reason] + known.num_stale
        # The share is learned only from the present load, because a forecast concerns another load.
        forecast = (min(self._trend.forecast(), _FORECAST_GROWTH * steady) + known.num_stale) / self._share.value
        share = self._share.update(seen.now_s, present, len(seen.running), self._attainment(seen, known.reports))
        self._note_calm(seen, known, present)
        return max((present / share, reason), (forecast, "forecast"))

    def _note_calm(self, seen: Observation, known: Sorted, present: float) -> None:
        """Note since when the fleet has been stable. From a change of the fleet, or the need for one, until the backlog
        is worked off, times to first token are missed by earlier requests, and say nothing about the engines' load."""
        running, self._num_running = self._num_running, len(seen.running)
        if len(seen.running) != running or max(seen.target, present) > len(seen.running):
            self._recovering = True
        if self._recovering:
            self._calm_since_s = seen.now_s
            self._recovering = any(_has_backlog(self._settings, report) for report in known.reports)

    def _attainment(self, seen: Observation, reports: Sequence[EngineReport]) -> float | None:
        """Return the attainment if all judged requests came while the fleet was stable; otherwise None."""
        if seen.now_s - self._calm_since_s < ATTAINMENT_WINDOW_S:
            return None
        judged = sum(report.num_judged for report in reports)
        in_time = sum(report.num_judged * report.ttft_attainment for report in reports)
        return in_time / judged if judged else 1.0

    def _settled(self, seen: Observation, need: float, known: Sorted) -> int:
        """Return the target, or another number that was needed for long enough."""
        settings, target = self._settings, seen.target
        wanted = min(seen.max_replicas, _whole(need))
        enough = max(1, seen.min_replicas, _whole(need / (1 - settings.downscale_margin)))
        # Overloaded engines cannot show how much more load there is, so replicas that are starting are kept.
        may_shrink = len(known.reports) == len(seen.running) >= enough
        may_end = may_shrink and target == 1 and seen.min_replicas == 0 and _is_idle(seen, known.reports)
        more = self._more.update(seen.now_s, target, wanted if wanted > target else None)
        fewer = self._fewer.update(seen.now_s, target, enough if may_shrink and enough < target else None)
        none = self._none.update(seen.now_s, target, 0 if may_end else None)
        if fewer is not None:
            fewer = max(fewer, target - max(1, math.floor(target * settings.downscale_step)))
        return next((number for number in (more, fewer, none) if number is not None), target)


def steady_terms(settings: ScalingSettings, reports: Sequence[EngineReport]) -> dict[str, float]:
    """Compute the replicas for running and arriving requests. A backlog at too few replicas does not increase these."""
    seats = sum(report.num_running / report.max_num_seqs for report in reports)
    prefill = sum(report.offered_load for report in reports)
    return {
        RUNNING: seats / settings.target_utilization,
        OFFERED: prefill / settings.target_utilization,
        KV: sum(report.kv_pressure for report in reports) / settings.target_kv_utilization,
    }


def waiting_terms(settings: ScalingSettings, reports: Sequence[EngineReport], outside: float) -> dict[str, float]:
    """Compute the replicas for running, arriving and waiting requests. The latter may be done before a replica
    starts."""
    steady = steady_terms(settings, reports)
    seats = sum(report.max_num_seqs for report in reports)
    waiting = outside + sum(report.num_waiting for report in reports if _is_seated(report))
    queue_s = sum(report.queue_s for report in reports)
    excess_s = max(0.0, queue_s - settings.target_queue_s * len(reports))
    prompts = sum(one.queued_prefill_tokens / one.kv_capacity_tokens for one in reports if one.kv_pressure >= _FULL)
    return {
        "waiting requests": steady[RUNNING] + waiting * len(reports) / max(1, seats) / settings.target_utilization,
        "queued prefill": steady[OFFERED] + excess_s / settings.drain_time_s,
        "KV blocks of waiting prompts": steady[KV] + prompts / settings.target_kv_utilization,
    }


def _is_seated(report: EngineReport) -> bool:
    """Whether an engine's seats are taken. Otherwise its waiting requests only wait to be computed, and are part of its
    queued tokens."""
    return report.num_running >= _FULL * report.max_num_seqs


def _has_backlog(settings: ScalingSettings, report: EngineReport) -> bool:
    return report.queue_s > settings.target_queue_s or (report.num_waiting > 0 and _is_seated(report))


def _whole(need: float) -> int:
    return math.ceil(need - _ROUNDING)


def _makes_room(seen: Observation, reports: Sequence[EngineReport]) -> bool:
    """Whether all replicas were asked to end for another model, and no request runs or waits. What came before does not
    matter, unlike for a replica that ends because nothing comes."""
    if not reports or len(reports) < len(seen.running) or seen.min_replicas or seen.router_queued:
        return False
    return all(
        one.asked_to_sleep and not (one.num_running or one.num_waiting or one.num_waiting_outside) for one in reports
    )


def _is_idle(seen: Observation, reports: Sequence[EngineReport]) -> bool:
    """Whether no request runs or waits, and none came and went between two reports."""
    busy = (
        one.num_running or one.num_waiting or one.num_waiting_outside or one.offered_prefill_tokens_per_s
        for one in reports
    )
    return seen.router_queued == 0 and not any(busy)
