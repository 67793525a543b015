"""Owns the interface that decides the number of simulated replicas, and our autoscaler behind it, with its real
reports.
Never starts or ends a replica; the deployment does."""

from __future__ import annotations

from typing import Protocol

from loadtest.sim.deployment import Deployment
from serve_app.scaling.autoscaler import Autoscaler, Observation
from serve_app.scaling.memory import StampedReport
from serve_app.settings.scaling import ScalingSettings

REPORT_S = 1.0
"""How often engines report, as in serve_app.scaling.policy."""


class Scaler(Protocol):
    """Decides the number of replicas every `period_s` seconds."""

    period_s: float

    def decide(self, deployment: Deployment, now_s: float, num_live: int) -> int:
        """Return the target number of replicas. `num_live` counts all requests that have arrived and not ended."""
        ...


class EngineLoad:
    """Our policy: calls the Autoscaler as serve_app.scaling.policy does, with engines that report once a second."""

    period_s = 0.5

    def __init__(self, settings: ScalingSettings, min_replicas: int, max_replicas: int) -> None:
        self._autoscaler = Autoscaler(settings)
        self._bounds = min_replicas, max_replicas
        self._reports: dict[str, StampedReport] = {}
        self._due_s = 0.0

    def decide(self, deployment: Deployment, now_s: float, num_live: int) -> int:
        if now_s >= self._due_s:
            self._reports = {name: replica.report() for name, replica in deployment.running.items()}
            self._due_s = now_s + REPORT_S
        seen = Observation(
            now_s=now_s,
            running={name: self._reports.get(name) for name in deployment.running},
            target=deployment.target,
            router_queued=float(deployment.num_waiting),
            min_replicas=self._bounds[0],
            max_replicas=self._bounds[1],
        )
        return self._autoscaler.decide(seen).num_replicas
