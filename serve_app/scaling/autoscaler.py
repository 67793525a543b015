"""Owns how many engine replicas a load needs, with the hysteresis that keeps that number still.
Never reads a clock or speaks to Ray: a moment's reports come in, a number and its reason go out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from serve_app.scaling.memory import Freshness, Lasting, LoadShare, Sorted, StampedReport, Trend
from serve_app.scaling.signals import ATTAINMENT_WINDOW_S, OFFERED_WINDOW_S, EngineReport

_ROUNDING = 1e-9
"""Sums of floats that should be whole are not rounded up to the next number."""
RUNNING, OFFERED, KV = "running requests", "offered prefill", "KV blocks in use"
_FULL = 0.9
"""From this share on, seats or blocks are what requests wait for: some are free at any moment, between two of them."""
_FORECAST_GROWTH = 2.0
"""A forecast is at most this multiple of the present load."""


class ScalingSettings(BaseModel):
    """Targets that a replica is loaded to, and how fast the number of replicas follows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_utilization: float = Field(
        0.7,
        description="Share of an engine's seats, and of its prefill throughput, that should be in use. Lower it for "
        "more headroom and more replicas.",
        gt=0,
        le=1,
    )
    target_kv_utilization: float = Field(
        0.8, description="Share of an engine's KV blocks that should be held or reserved.", gt=0, le=1
    )
    target_queue_s: float = Field(2, description="Seconds of prefill work that may wait at an engine.", gt=0)
    drain_time_s: float = Field(
        30,
        description="Time in which work beyond that is to be done, besides all that arrives, in seconds. Lower it to "
        "add more replicas for a burst.",
        gt=0,
    )
    ttft_objective: float = Field(
        0.9,
        description="Share of requests that should meet `ttft_target_ms`. Below it, busy engines are planned with less "
        "load each.",
        gt=0,
        le=1,
    )
    startup_time_s: float = Field(
        60,
        description="How far ahead a steady rise of the load is extrapolated, in seconds: the time that a replica "
        "takes to start. 0: off.",
        ge=0,
    )
    max_growth: float = Field(
        2, description="Waiting work may ask for at most this many times the running replicas.", gt=1
    )
    upscale_delay_s: float = Field(
        2, description="How long a higher load must last before replicas are added, in seconds.", ge=0
    )
    downscale_delay_s: float = Field(
        300, description="How long the load must be lower before one step of replicas is removed, in seconds.", ge=0
    )
    downscale_to_zero_delay_s: float = Field(
        600,
        description="How long nothing must have run or waited before the last replica is removed, in seconds.",
        ge=0,
    )
    downscale_step: float = Field(
        0.25,
        description="Largest share of the replicas that one step removes; always at least one replica.",
        gt=0,
        le=1,
    )
    downscale_margin: float = Field(
        0.1,
        description="Share of their targets that the remaining replicas must have left after a step down.",
        ge=0,
        lt=1,
    )
    stale_after_s: float = Field(
        10,
        description="After this many seconds without a report, a replica is assumed to be full, and no replica is "
        "removed.",
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known at one moment."""

    now_s: float
    """Of a clock that never goes back."""
    running: Mapping[str, StampedReport | None]
    """Every running replica, with its last report if there is one."""
    target: int
    """Replicas that were asked for, running or starting."""
    router_queued: float
    """Requests that have not reached an engine."""
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class Decision:
    num_replicas: int
    reason: str
    """The term that needs the most replicas."""
    need: float
    """Replicas that the load needs, before rounding and hysteresis."""
    num_stale: int
    """Running replicas without a recent report."""


class Autoscaler:
    """The state of one deployment's scaling. Call `decide` several times a second.

    A need is a number of replicas, in parts: the whole load divided by the share of it that one replica is to have.
    It does not depend on how many run, so replicas that are still starting are not asked for again.
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
        """The number of replicas to run from now on, within the bounds. More load never gives a smaller one."""
        self._note_time(seen)
        known = self._freshness.sort(seen.now_s, seen.running)
        need, reason = self._need(seen, known)
        # With none running, all are starting, or there is none: nothing is measured, and nothing is taken away.
        wanted = self._settled(seen, need, known) if seen.running else max(seen.target, int(seen.router_queued > 0))
        return Decision(min(seen.max_replicas, max(seen.min_replicas, wanted)), reason, need, known.num_stale)

    def _note_time(self, seen: Observation) -> None:
        unseen = seen.now_s - self._last_s > self._settings.stale_after_s
        if unseen or not seen.running:  # nobody knows whether it lasted
            for lasting in (self._more, self._fewer, self._none):
                lasting.end()
        self._last_s = seen.now_s

    def _need(self, seen: Observation, known: Sorted) -> tuple[float, str]:
        """Replicas that the load needs, and the term that says so. One without news is assumed to be full."""
        terms = steady_terms(self._settings, known.reports)
        steady = max(terms.values())
        if known.reports and len(known.reports) == len(seen.running):
            self._trend.add(seen.now_s, steady)
        limit = self._settings.max_growth * len(seen.running)
        # What waits before the engines may go to any of them, so each of them knows of all of it.
        outside = seen.router_queued + max((report.num_waiting_outside for report in known.reports), default=0.0)
        waiting = waiting_terms(self._settings, known.reports, outside)
        terms |= {name: min(need, limit) for name, need in waiting.items()}
        reason = max(terms, key=terms.__getitem__)
        present = terms[reason] + known.num_stale
        # What this moment teaches, it teaches of its own load: a forecast is of another.
        forecast = (min(self._trend.forecast(), _FORECAST_GROWTH * steady) + known.num_stale) / self._share.value
        share = self._share.update(seen.now_s, present, len(seen.running), self._attainment(seen, known.reports))
        self._note_calm(seen, known, present)
        return max((present / share, reason), (forecast, "forecast"))

    def _note_calm(self, seen: Observation, known: Sorted, present: float) -> None:
        """From a change of the fleet, or a need for one, until what waited is worked off, times to first token say
        nothing of the load that engines have: they are missed by requests that came before."""
        running, self._num_running = self._num_running, len(seen.running)
        if len(seen.running) != running or max(seen.target, present) > len(seen.running):
            self._recovering = True
        if self._recovering:
            self._calm_since_s = seen.now_s
            self._recovering = any(_has_backlog(self._settings, report) for report in known.reports)

    def _attainment(self, seen: Observation, reports: Sequence[EngineReport]) -> float | None:
        """Of requests that came while the fleet was as it is; else None."""
        if seen.now_s - self._calm_since_s < ATTAINMENT_WINDOW_S:
            return None
        judged = sum(report.num_judged for report in reports)
        in_time = sum(report.num_judged * report.ttft_attainment for report in reports)
        return in_time / judged if judged else 1.0

    def _settled(self, seen: Observation, need: float, known: Sorted) -> int:
        """The target, or another number that has been called for long enough."""
        settings, target = self._settings, seen.target
        wanted = min(seen.max_replicas, _whole(need))
        enough = max(1, seen.min_replicas, _whole(need / (1 - settings.downscale_margin)))
        # Engines that have more than they can do show no more than that: then those that are starting are needed.
        may_shrink = len(known.reports) == len(seen.running) >= enough
        may_end = may_shrink and target == 1 and seen.min_replicas == 0 and _is_idle(seen, known.reports)
        more = self._more.update(seen.now_s, target, wanted if wanted > target else None)
        fewer = self._fewer.update(seen.now_s, target, enough if may_shrink and enough < target else None)
        none = self._none.update(seen.now_s, target, 0 if may_end else None)
        if fewer is not None:
            fewer = max(fewer, target - max(1, math.floor(target * settings.downscale_step)))
        return next((number for number in (more, fewer, none) if number is not None), target)


def steady_terms(settings: ScalingSettings, reports: Sequence[EngineReport]) -> dict[str, float]:
    """Replicas needed by what runs and arrives. Requests that pile up at too few replicas do not raise these."""
    seats = sum(report.num_running / report.max_num_seqs for report in reports)
    prefill = sum(report.offered_prefill_tokens_per_s / report.prefill_tokens_per_s for report in reports)
    return {
        RUNNING: seats / settings.target_utilization,
        OFFERED: prefill / settings.target_utilization,
        KV: sum(report.kv_pressure for report in reports) / settings.target_kv_utilization,
    }


def waiting_terms(settings: ScalingSettings, reports: Sequence[EngineReport], outside: float) -> dict[str, float]:
    """Replicas needed by what runs, arrives and waits. What waits may be gone before another replica has started."""
    steady = steady_terms(settings, reports)
    seats = sum(report.max_num_seqs for report in reports)
    waiting = outside + sum(report.num_waiting for report in reports if _is_seated(report))
    queue_s = sum(report.queued_prefill_tokens / report.prefill_tokens_per_s for report in reports)
    excess_s = max(0.0, queue_s - settings.target_queue_s * len(reports))
    prompts = sum(one.queued_prefill_tokens / one.kv_capacity_tokens for one in reports if one.kv_pressure >= _FULL)
    return {
        "waiting requests": steady[RUNNING] + waiting * len(reports) / max(1, seats) / settings.target_utilization,
        "queued prefill": steady[OFFERED] + excess_s / settings.drain_time_s,
        "KV blocks of waiting prompts": steady[KV] + prompts / settings.target_kv_utilization,
    }


def _is_seated(report: EngineReport) -> bool:
    """Else what waits there waits for its turn to be computed, and queued tokens say how much that is."""
    return report.num_running >= _FULL * report.max_num_seqs


def _has_backlog(settings: ScalingSettings, report: EngineReport) -> bool:
    queue_s = report.queued_prefill_tokens / report.prefill_tokens_per_s
    return queue_s > settings.target_queue_s or (report.num_waiting > 0 and _is_seated(report))


def _whole(need: float) -> int:
    return math.ceil(need - _ROUNDING)


def _is_idle(seen: Observation, reports: Sequence[EngineReport]) -> bool:
    """Nothing runs or waits, and nothing came and went between two reports."""
    busy = (
        one.num_running or one.num_waiting or one.num_waiting_outside or one.offered_prefill_tokens_per_s
        for one in reports
    )
    return seen.router_queued == 0 and not any(busy)
