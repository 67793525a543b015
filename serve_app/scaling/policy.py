"""Owns what joins our scaling to Ray Serve's: the policy class that its controller calls, the deployment's options.
Never decides on replicas; serve_app.scaling.autoscaler does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from serve_app.scaling.autoscaler import Autoscaler, Decision, Observation
from serve_app.scaling.memory import StampedReport
from serve_app.scaling.signals import EngineReport
from serve_app.settings.application import AppSettings
from serve_app.settings.scaling import AutoscalingSettings, ScalingSettings

POLICY = "serve_app.scaling.policy:EngineLoadPolicy"

_METRICS_INTERVAL_S = 1.0
"""How often replicas and handles report. Serve's default of 10 s would make every report stale when it is read."""
_LOOK_BACK_S = 2.0
"""Over which Serve averages requests that wait at handles; it must be longer than the interval."""

# Serve's own logger: this runs in its controller, whose log file has no other.
logger = logging.getLogger("ray.serve")


class EngineLoadPolicy:
    """Scales the engine deployment by what its engines report; `policy_kwargs` are the fields of ScalingSettings.

    Serve makes one for each deployment, anew when the deployment changes, and calls it every tenth of a second. It
    then applies factors, delays and bounds of its own: see `_serve_config` for what leaves the decision to us. While no
    replica runs and requests wait, it does not ask: it keeps the target, and makes it one where it is zero.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self._clock = clock
        self._autoscaler = Autoscaler(ScalingSettings(**settings))
        self._num_stale = 0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        decision = self._autoscaler.decide(observation(ctx, self._clock()))
        self._log(ctx, decision)
        return decision.num_replicas, {}

    def _log(self, ctx: AutoscalingContext, decision: Decision) -> None:
        if decision.num_replicas != ctx.target_num_replicas:
            change = f"from {ctx.target_num_replicas} to {decision.num_replicas} replicas"
            logger.info(f"{ctx.deployment_id}: {change}; {decision.reason} needs {decision.need:.2f}.")
        if decision.num_stale > self._num_stale:
            logger.warning(
                f"{ctx.deployment_id}: {decision.num_stale} replicas do not report their load; none is removed."
            )
        self._num_stale = decision.num_stale


def observation(ctx: AutoscalingContext, now_s: float) -> Observation:
    """What Serve's context says, in our words. The newest sample of each metric counts, not Serve's average."""
    metrics = ctx.raw_metrics or {}
    return Observation(
        now_s=now_s,
        running={replica.unique_id: _newest(metrics, replica) for replica in ctx.running_replicas},
        target=ctx.target_num_replicas,
        router_queued=ctx.total_queued_requests or 0.0,
        min_replicas=ctx.capacity_adjusted_min_replicas,
        max_replicas=ctx.capacity_adjusted_max_replicas,
    )


def _newest(metrics: dict[str, dict[Any, Any]], replica: Any) -> StampedReport | None:
    """A replica's last report; None if it has sent none, or reports other things than ours."""
    samples = {name: series[replica][-1] for name, series in metrics.items() if series.get(replica)}
    report = EngineReport.from_stats({name: sample.value for name, sample in samples.items()})
    return StampedReport(max(sample.timestamp for sample in samples.values()), report) if report else None


def deployment_options(settings: AppSettings) -> dict[str, Any]:
    """The keyword of serve.deployment that says how many engine replicas there are."""
    if settings.autoscaling is None:
        return {"num_replicas": settings.engine_replicas}
    # A number to start with is taken again at each deployment of a change, however many replicas the load needs then:
    # it is given only where the user gives one.
    initial = settings.engine_replicas if "engine_replicas" in settings.model_fields_set else None
    return {"autoscaling_config": _serve_config(settings.autoscaling, initial)}


def _serve_config(scaling: AutoscalingSettings, initial_replicas: int | None) -> AutoscalingConfig:
    """Serve's config with all that it does to a policy's number turned off, but for the bounds.

    It would multiply the change by a factor, hold it until it was wanted for `upscale_delay_s` (30 by default) or
    `downscale_delay_s` (600), and let the last replica go after `downscale_to_zero_delay_s`, on top of our own delays.
    `target_ongoing_requests` is its own policy's: ours does not read it.
    """
    kwargs = {name: getattr(scaling, name) for name in ScalingSettings.model_fields}
    config = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        initial_replicas=initial_replicas,
        upscaling_factor=1.0,
        downscaling_factor=1.0,
        upscale_delay_s=0,
        downscale_delay_s=0,
        downscale_to_zero_delay_s=0,
        policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=kwargs),
    )
    # Copied in, not validated: Serve warns that this interval is deprecated, and reads no other one in this release.
    return config.model_copy(update={"metrics_interval_s": _METRICS_INTERVAL_S, "look_back_period_s": _LOOK_BACK_S})
