"""Owns how many engine replicas a load needs, with the hysteresis that keeps that number still.
Never reads a clock or speaks to Ray: a moment's reports come in, a number and its reason go out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field

from serve_app.engine_signals import ATTAINMENT_WINDOW_S, EngineReport

_ROUNDING = 1e-9
"""Sums of floats that should be whole are not rounded up to the next number."""
_LEAST_SHARE = 0.5
"""TTFT may lower the load that an engine is given to this share of its targets, and no further."""
_SHARE_RECOVERY_S = 3600.0
"""After this time, what a missed TTFT objective has taught counts for 1/e."""
_FORECAST_GROWTH = 2.0
"""A forecast is at most this multiple of the present load."""
_TREND_BUCKETS = 4


class ScalingSettings(BaseModel):
    """Targets that a replica is loaded to, and how fast the number of replicas follows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_utilization: float = Field(
        0.7, description="Share of an engine's seats, and of its prefill throughput, that is to be in use.", gt=0, le=1
    )
    target_kv_utilization: float = Field(
        0.8, description="Share of an engine's KV blocks that is to be held or reserved.", gt=0, le=1
    )
    target_queue_s: float = Field(2, description="Seconds of prefill work that may wait at an engine.", gt=0)
    ttft_objective: float = Field(
        0.9,
        description="Share of requests that are to meet `ttft_target_ms`; below it, busy engines are given less load.",
        gt=0,
        le=1,
    )
    startup_time_s: float = Field(
        60, description="How far ahead a steady rise of the load is extrapolated: a replica's start-up. 0: off.", ge=0
    )
    max_growth: float = Field(
        2, description="Waiting work may ask for at most this multiple of the running replicas.", gt=1
    )
    upscale_delay_s: float = Field(2, description="How long more load must last before replicas are added.", ge=0)
    downscale_delay_s: float = Field(
        300, description="How long the load must be low before one step of replicas is removed.", ge=0
    )
    downscale_to_zero_delay_s: float = Field(
        600, description="How long nothing may have run or waited before the last replica is removed.", ge=0
    )
    downscale_step: float = Field(
        0.25, description="Largest share of the replicas that one step removes; at least one.", gt=0, le=1
    )
    downscale_margin: float = Field(
        0.1, description="Share of their targets that the remaining replicas must have left after a step.", ge=0, lt=1
    )
    stale_after_s: float = Field(
        10, description="A replica without news for this long is assumed full, and nothing is removed.", gt=0
    )


@dataclass(frozen=True, slots=True)
class StampedReport:
    """A report, and a number that changes with each new one. Never compared with our clock: clocks differ."""

    stamp: float
    report: EngineReport


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
        self._freshness = _Freshness(settings.stale_after_s)
        self._trend = _Trend(settings.startup_time_s)
        self._share = _Share(settings.ttft_objective)
        self._low, self._high, self._idle = _Lasting(), _Lasting(), _Lasting()
        self._last_s = -math.inf

    def decide(self, seen: Observation) -> Decision:
        """The number of replicas to run from now on, within the bounds. More load never gives a smaller one."""
        if seen.now_s - self._last_s > self._settings.stale_after_s:
            self._low.end(), self._high.end(), self._idle.end()  # nobody knows how it was in between
        self._last_s = seen.now_s
        reports = self._freshness.recent(seen)
        num_stale = len(seen.running) - len(reports)
        need, reason = self._need(seen, reports, num_stale)
        if not seen.running:  # only starting ones, or none: there is nothing to measure, and nothing to take away
            wanted = max(seen.target, int(seen.router_queued > 0))
        else:
            wanted = self._settled(seen, need, may_shrink=num_stale == 0, idle=_is_idle(seen, reports))
        return Decision(min(seen.max_replicas, max(seen.min_replicas, wanted)), reason, need, num_stale)

    def _need(self, seen: Observation, reports: Sequence[EngineReport], num_stale: int) -> tuple[float, str]:
        running = len(seen.running)
        terms = steady_terms(self._settings, reports)
        if num_stale == 0 and running:
            self._trend.add(seen.now_s, max(terms.values()))
        forecast = min(self._trend.forecast(), _FORECAST_GROWTH * max(terms.values()))
        limit = self._settings.max_growth * len(reports)
        for name, value in waiting_terms(self._settings, reports, seen.router_queued).items():
            terms[name] = min(value, limit)
        share = self._share.update(seen, reports, max(terms.values()) + num_stale)
        if share < 1:
            terms = {f"{name}, lowered for TTFT": value / share for name, value in terms.items()}
        terms["forecast"] = forecast / share
        reason = max(terms, key=terms.__getitem__)
        return terms[reason] + num_stale, reason  # a replica without news is assumed to have its full share

    def _settled(self, seen: Observation, need: float, *, may_shrink: bool, idle: bool) -> int:
        """The target, or another number that has been called for long enough."""
        settings, target = self._settings, seen.target
        wanted = min(seen.max_replicas, _whole(need))
        more = self._high.least(seen.now_s, target, wanted if wanted > target else None)
        enough = max(1, seen.min_replicas, _whole(need / (1 - settings.downscale_margin)))
        fewer = self._low.most(seen.now_s, target, enough if may_shrink and enough < target else None)
        empty = idle and may_shrink and target == 1 and seen.min_replicas == 0
        self._idle.most(seen.now_s, target, 0 if empty else None)
        if more is not None and self._high.lasted_s(seen.now_s) >= settings.upscale_delay_s:
            return more
        if fewer is not None and self._low.lasted_s(seen.now_s) >= settings.downscale_delay_s:
            return max(fewer, target - max(1, math.floor(target * settings.downscale_step)))
        if empty and self._idle.lasted_s(seen.now_s) >= settings.downscale_to_zero_delay_s:
            return 0
        return target


def steady_terms(settings: ScalingSettings, reports: Sequence[EngineReport]) -> dict[str, float]:
    """Replicas needed by what runs and arrives. Requests that pile up at too few replicas do not raise these."""
    seats = sum(report.num_running / report.max_num_seqs for report in reports)
    prefill = sum(report.offered_prefill_tokens_per_s / report.prefill_tokens_per_s for report in reports)
    return {
        "running requests": seats / settings.target_utilization,
        "offered prefill": prefill / settings.target_utilization,
        "KV pressure": sum(report.kv_pressure for report in reports) / settings.target_kv_utilization,
    }


def waiting_terms(
    settings: ScalingSettings, reports: Sequence[EngineReport], router_queued: float
) -> dict[str, float]:
    """Replicas needed to have what waits within the targets at once. It may be gone before a replica has started."""
    seats = sum(report.max_num_seqs for report in reports)
    requests = sum(report.num_running + report.num_waiting for report in reports) + router_queued
    queue_s = sum(report.queued_prefill_tokens / report.prefill_tokens_per_s for report in reports)
    return {
        "waiting requests": requests * len(reports) / seats / settings.target_utilization if reports else 0.0,
        "queued prefill": queue_s / settings.target_queue_s,
    }


def _whole(need: float) -> int:
    return math.ceil(need - _ROUNDING)


def _is_idle(seen: Observation, reports: Sequence[EngineReport]) -> bool:
    """Nothing runs or waits, and nothing came and went between two reports."""
    busy = (report.num_running or report.num_waiting or report.offered_prefill_tokens_per_s for report in reports)
    return seen.router_queued == 0 and not any(busy)


@dataclass(slots=True)
class _Lasting:
    """Something that has been so, at one target, without a break."""

    _since_s: float | None = None
    _target: int = 0
    _extreme: int = 0

    def end(self) -> None:
        self._since_s = None

    def lasted_s(self, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    def least(self, now_s: float, target: int, value: int | None) -> int | None:
        """The least value while it lasted; None ends it."""
        return self._update(now_s, target, value, min)

    def most(self, now_s: float, target: int, value: int | None) -> int | None:
        """The greatest value while it lasted; None ends it."""
        return self._update(now_s, target, value, max)

    def _update(self, now_s: float, target: int, value: int | None, choose: type | object) -> int | None:
        raise NotImplementedError
