"""Owns Ray Serve's own autoscaling policy in a simulation: its code, called as its controller calls it.
Never changes its decisions; the bounds are applied as the controller applies them."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from loadtest.sim.deployment import Deployment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own models use deprecated features of pydantic
    from ray.serve import autoscaling_policy
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

_ENGINE = DeploymentID(name="Engine", app_name="default")


@contextmanager
def serve_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Make Serve's policy read this clock within the block. It measures its delays with `time.time()`, for which a
    simulated hour lasts a second, so it would never scale."""
    with patch.object(autoscaling_policy, "time", SimpleNamespace(time=clock)):
        yield


class ServeDefault:
    """Compares ongoing requests per replica with a target, with Serve's defaults for all else: they are sampled every
    second and averaged over `look_back_period_s`; replicas are added after 30 s and removed after 600 s."""

    period_s = 1.0

    def __init__(
        self, target_ongoing_requests: float, min_replicas: int, max_replicas: int, clock: Callable[[], float]
    ) -> None:
        self._config = AutoscalingConfig(
            min_replicas=min_replicas, max_replicas=max_replicas, target_ongoing_requests=target_ongoing_requests
        )
        self._clock = clock
        self._policy = autoscaling_policy._apply_autoscaling_config(
            autoscaling_policy.replica_queue_length_autoscaling_policy
        )
        self._state: dict[str, Any] = {}
        self._samples: deque[int] = deque(maxlen=round(self._config.look_back_period_s / self.period_s))

    def decide(self, deployment: Deployment, now_s: float, num_live: int) -> int:
        self._samples.append(num_live)
        context = self._context(deployment, now_s, sum(self._samples) / len(self._samples))
        with serve_clock(self._clock):
            number, self._state = self._policy(context)
        return int(max(self._config.min_replicas, min(self._config.max_replicas, number)))

    def _context(self, deployment: Deployment, now_s: float, ongoing: float) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=_ENGINE,
            deployment_name=_ENGINE.name,
            app_name=_ENGINE.app_name,
            current_num_replicas=len(deployment.running),
            target_num_replicas=deployment.target,
            running_replicas=[_replica_id(name) for name in deployment.running],
            total_num_requests=ongoing,
            total_queued_requests=float(deployment.num_waiting),
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=self._config.min_replicas,
            capacity_adjusted_max_replicas=self._config.max_replicas,
            policy_state=self._state.copy(),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=self._config,
        )


@functools.cache
def _replica_id(name: str) -> ReplicaID:
    return ReplicaID(name, _ENGINE)
