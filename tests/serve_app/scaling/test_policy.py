"""The policy as Ray Serve calls it, with Serve's own post-processing; and the options that the deployment gets."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.scaling.signals import EngineReport
from serve_app.settings.application import AppSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own models use what pydantic deprecates
    from ray import serve
    from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    from serve_app.scaling import policy
    from serve_app.scaling.policy import POLICY, EngineLoadPolicy, deployment_options, observation

ENGINE = DeploymentID(name="Engine", app_name="default")
IDLE = EngineReport(0, 0, 10, 0, 1000.0, 0.0, 0.0, 16_000, 0, 1.0)
BUSY = EngineReport(10, 8, 10, 0, 1000.0, 0.0, 0.0, 16_000, 0, 1.0)
QUICK = {"upscale_delay_s": 0, "downscale_delay_s": 5, "downscale_to_zero_delay_s": 5, "startup_time_s": 0}


def options(**autoscaling: Any) -> AutoscalingConfig:
    settings = AppSettings.model_validate({"autoscaling": {"max_replicas": 4, **QUICK, **autoscaling}})
    config = deployment_options(settings)["autoscaling_config"]
    assert isinstance(config, AutoscalingConfig)
    return config


class Controller:
    """Calls a policy as Serve's controller does: wrapped, with a context made from the replicas' last reports."""

    def __init__(self, config: AutoscalingConfig, target: int = 1) -> None:
        self.config, self.target, self.now_s = config, target, 0.0
        policy = config.policy.get_policy()(**config.policy.policy_kwargs, clock=lambda: self.now_s)
        self._policy = _apply_autoscaling_config(policy.__call__)
        self._state: dict[str, Any] = {}

    def tick(self, reports: list[EngineReport | None], *, queued: float = 0, requests: float = 0) -> int:
        self.now_s += 1
        ctx = context(self.config, self.target, reports, self.now_s, queued, requests, self._state)
        number, self._state = self._policy(ctx)
        self.target = max(self.config.min_replicas, min(self.config.max_replicas, number))
        return self.target


def context(
    config: AutoscalingConfig,
    target: int,
    reports: list[EngineReport | None],
    at_s: float,
    queued: float = 0,
    requests: float = 0,
    state: dict[str, Any] | None = None,
) -> AutoscalingContext:
    replicas = [ReplicaID(f"replica{index}", ENGINE) for index in range(len(reports))]
    metrics: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {"running_requests": {}}
    for replica, report in zip(replicas, reports, strict=True):
        for name, value in report.as_stats().items() if report else ():
            old = TimeStampedValue(at_s - 1, 1e6)  # an average would be far off
            metrics.setdefault(name, {})[replica] = [old, TimeStampedValue(at_s, value)]
    return AutoscalingContext(
        deployment_id=ENGINE,
        deployment_name="Engine",
        app_name="default",
        current_num_replicas=len(replicas),
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=requests,
        total_queued_requests=queued,
        aggregated_metrics={},
        raw_metrics=lambda: metrics,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=at_s,
        config=config,
    )


def test_without_autoscaling_the_number_is_the_users() -> None:
    assert deployment_options(AppSettings(engine_replicas=3)) == {"num_replicas": 3}


def test_serve_takes_the_options_without_a_warning_and_its_own_delays_are_off() -> None:
    deployment = serve.deployment(name="Engine", **deployment_options(autoscaled(max_replicas=5)))(object)
    config = deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (1, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s, config.downscale_to_zero_delay_s) == (0, 0, 0)
    assert (config.get_upscaling_factor(), config.get_downscaling_factor()) == (1, 1)
    assert (config.metrics_interval_s, config.look_back_period_s) == (1, 2)
    assert config.policy.policy_function == POLICY


def autoscaled(**autoscaling: Any) -> AppSettings:
    return AppSettings.model_validate({"autoscaling": autoscaling})


def test_a_number_to_start_with_is_set_only_where_the_user_gives_one() -> None:
    """Serve returns to that number at each change of the deployment, whatever the load."""
    assert options().initial_replicas is None
    given = AppSettings.model_validate({"engine_replicas": 2, "autoscaling": {"max_replicas": 4}})
    assert deployment_options(given)["autoscaling_config"].initial_replicas == 2


def test_the_policy_gets_the_settings_and_refuses_what_it_does_not_know() -> None:
    assert options(target_queue_s=7).policy.policy_kwargs["target_queue_s"] == 7
    with pytest.raises(ValidationError, match="target_queue"):
        EngineLoadPolicy(target_queue=7)


def test_a_users_own_serve_config_names_the_policy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # metrics_interval_s
        config = AutoscalingConfig(
            max_replicas=4,
            metrics_interval_s=1,
            look_back_period_s=2,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy={"policy_function": POLICY, "policy_kwargs": {"upscale_delay_s": 0}},
        )
    assert Controller(config).tick([BUSY]) == 2


def test_the_policy_survives_pickling_by_value_as_serve_does_it() -> None:
    policy = options().policy
    again = type(policy).from_serialized_policy_def(policy.model_dump(), policy.get_serialized_policy_def())
    assert again.get_policy().__name__ == "EngineLoadPolicy"


def test_load_goes_up_and_down_through_serves_post_processing() -> None:
    controller = Controller(options())
    assert controller.tick([BUSY]) == 2
    for _ in range(60):
        controller.tick([IDLE] * controller.target)
    assert controller.target == 1


def test_none_goes_to_one_and_back() -> None:
    controller = Controller(options(min_replicas=0), target=0)
    assert controller.tick([]) == 0
    assert controller.tick([], queued=1, requests=1) == 1, "by Serve itself"
    assert controller.tick([]) == 1, "it is starting, and the caller gave up"
    for _ in range(5):
        assert controller.tick([IDLE]) == 1
    controller.tick([IDLE])
    assert controller.target == 0


def test_requests_that_wait_at_none_reach_the_policy_where_serve_does_not_start_one() -> None:
    assert Controller(options(min_replicas=0), target=0).tick([], queued=1) == 1


def test_the_newest_sample_counts() -> None:
    seen = observation(context(options(), 2, [IDLE, BUSY], at_s=5), now_s=50)
    first, second = seen.running.values()
    assert first is not None
    assert second is not None
    assert (first.report, second.report, first.stamp, seen.now_s) == (IDLE, BUSY, 5, 50)


def test_a_replica_with_other_metrics_than_ours_has_no_report() -> None:
    ctx = context(options(), 2, [IDLE, None], at_s=5)
    ctx.raw_metrics["kv_pressure"].clear()
    assert set(observation(ctx, 0).running.values()) == {None}


def test_changes_are_logged_with_their_reason_and_silence_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = logging.Logger("policy")  # Ray's loggers pass a record on, or not, by what the process did before
    own.addHandler(caplog.handler)
    monkeypatch.setattr(policy, "logger", own)
    controller = Controller(options())
    controller.tick([BUSY])
    for _ in range(40):
        controller.tick([IDLE, None])
    up, silent = [record.getMessage() for record in caplog.records]
    assert "from 1 to 2 replicas; waiting requests needs" in up
    assert "1 replicas do not report" in silent
