"""Connects our scaling to Ray Serve's: the policy class that its controller calls, and the deployment's options.
Never decides on replicas: serve_app.scaling.autoscaler does."""

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
"""How often replicas and handles report. With Serve's default of 10 s, every report would be stale when it is read."""
_LOOK_BACK_S = 2.0
"""The window in which Serve averages requests that wait at handles; it must be longer than the interval."""

# Serve's own logger, because this runs in its controller, and only that logger writes to the controller's log file.
logger = logging.getLogger("ray.serve")


class EngineLoadPolicy:
    """Scales the engine deployment by its engines' reports. `policy_kwargs` are the fields of ScalingSettings.

    Serve makes one object for each deployment, and a new one when the deployment changes. It calls the object every
    tenth of a second, and then applies factors, delays and bounds of its own, which `_serve_config` turns off. While no
    replica runs and requests wait, Serve does not call it, but keeps the target, or makes it one if it is zero.
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
                f"{ctx.deployment_id}: {decision.num_stale} replicas do not report their load; no replica is removed."
            )
        self._num_stale = decision.num_stale


def observation(ctx: AutoscalingContext, now_s: float) -> Observation:
    """Convert Serve's context to an Observation, with the newest sample of each metric instead of Serve's average."""
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
    """Return a replica's last report; None if it has sent none, or has other metrics than ours."""
    samples = {name: series[replica][-1] for name, series in metrics.items() if series.get(replica)}
    report = EngineReport.from_stats({name: sample.value for name, sample in samples.items()})
    return StampedReport(max(sample.timestamp for sample in samples.values()), report) if report else None


def deployment_options(settings: AppSettings) -> dict[str, Any]:
    """Return the keyword of serve.deployment that sets the number of engine replicas."""
    if settings.autoscaling is None:
        return {"num_replicas": settings.engine_replicas}
    # Serve applies the initial number at each deployment of a change, however many replicas the load needs then. So it
    # is only set if the user sets it.
    initial = settings.engine_replicas if "engine_replicas" in settings.model_fields_set else None
    return {"autoscaling_config": _serve_config(settings.autoscaling, initial)}


def _serve_config(scaling: AutoscalingSettings, initial_replicas: int | None) -> AutoscalingConfig:
    """Make Serve's config, with everything that it does to a policy's number turned off except the bounds.

    Otherwise Serve would multiply the change by a factor, delay it by `upscale_delay_s` (30 by default) or
    `downscale_delay_s` (600), and remove the last replica after `downscale_to_zero_delay_s`, in addition to our own
    delays. `target_ongoing_requests` belongs to Serve's own policy; ours does not read it.
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
    # Set without validation, because Serve warns that this interval is deprecated, but reads no other in this release.
    return config.model_copy(update={"metrics_interval_s": _METRICS_INTERVAL_S, "look_back_period_s": _LOOK_BACK_S})
