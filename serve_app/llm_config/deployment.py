"""Reads `deployment_config`, Ray's options of a deployment, as settings of this project's application.
Never reads what a replica runs: `engine` does."""

from __future__ import annotations

from typing import Any

from serve_app.llm_config.taking import Taking

PATH = "deployment_config"
AUTO_MOST = 100
"""The most replicas of `num_replicas: auto`, as in Ray."""
_BOUNDS = "autoscaling_config"
_TOOK = {"min_replicas", "max_replicas", "initial_replicas"}
_DELAYS = ("upscale_delay_s", "downscale_delay_s", "downscale_to_zero_delay_s")
_SAME = ("health_check_period_s", "health_check_timeout_s")
_WHY_LEFT_OUT = {
    "name": "the deployments are called Engine and Ingress",
    "user_config": "there is nothing to reconfigure while a replica runs",
    "logging_config": "set logging_config beside `applications`",
    "graceful_shutdown_wait_loop_s": "a replica ends as soon as its last request has",
    "request_router_config": "requests are routed by cached prefixes and load; see `routing`",
    "max_constructor_retry_count": "Ray's default holds",
}


def read_deployment(taking: Taking, config: dict[str, Any]) -> None:
    """Read all options; each is taken along or noted."""
    given = taking.mapping(PATH, config.get(PATH))
    _read_replicas(taking, given)
    for name in _SAME:
        if name in given:
            taking.put(name, given[name])
    if (most := given.get("max_ongoing_requests")) is not None:
        text = "an engine runs engine.max_num_seqs requests, and engine.max_queued_requests wait for it"
        taking.leave_out(f"{PATH}.max_ongoing_requests", most, text)
    if (queue := given.get("max_queued_requests", -1)) != -1:
        taking.put("engine.max_queued_requests", queue)
        text = "it bounds what waits for each engine, and not for each handle"
        taking.changed(f"{PATH}.max_queued_requests", queue, text)
    if (drain := given.get("graceful_shutdown_timeout_s")) is not None:
        taking.put("drain_timeout_s", drain)
        taking.changed(f"{PATH}.graceful_shutdown_timeout_s", drain, "taken as drain_timeout_s; answers end by then")
    _read_actor(taking, taking.mapping(f"{PATH}.ray_actor_options", given.get("ray_actor_options")))
    known = {
        *("num_replicas", _BOUNDS, "max_ongoing_requests", "max_queued_requests", "graceful_shutdown_timeout_s"),
        *("ray_actor_options", *_SAME),
    }
    for name, value in given.items():
        if name not in known:
            why = _WHY_LEFT_OUT.get(name, "the application's own deployments have no such option")
            taking.leave_out(f"{PATH}.{name}", value, why)


def _read_replicas(taking: Taking, given: dict[str, Any]) -> None:
    count = given.get("num_replicas")
    bounds = taking.mapping(f"{PATH}.{_BOUNDS}", given.get(_BOUNDS))
    if count == "auto":
        bounds = {"min_replicas": 1, "max_replicas": AUTO_MOST, **bounds}
    elif count is not None:
        taking.put("engine_replicas", count)
    if not bounds or (count is not None and count != "auto"):
        return
    least, most = bounds.get("min_replicas", 1), bounds.get("max_replicas", 1)
    path = f"{PATH}.{_BOUNDS}"
    if least == most:
        taking.put("engine_replicas", least)
        taking.leave_out_rest(path, bounds, _TOOK, "the number of replicas is fixed: min_replicas is max_replicas")
        return
    taking.put("autoscaling.min_replicas", least)
    taking.put("autoscaling.max_replicas", most)
    if first := bounds.get("initial_replicas"):  # 0 is what min_replicas 0 begins with anyway
        taking.put("engine_replicas", first)
    for name in _DELAYS:
        if name in bounds:
            taking.put(f"autoscaling.{name}", bounds[name])
    if (target := bounds.get("target_ongoing_requests")) is not None:
        text = "replicas follow the engines' tokens, seats, memory and waiting work; see docs/how-to/autoscaling.md"
        taking.leave_out(f"{path}.target_ongoing_requests", target, text)
    known = {*_TOOK, *_DELAYS, "target_ongoing_requests"}
    taking.leave_out_rest(path, bounds, known, "the autoscaler is chunkserve's own; `autoscaling` has its settings")


def _read_actor(taking: Taking, options: dict[str, Any]) -> None:
    path = f"{PATH}.ray_actor_options"
    if (cpus := options.get("num_cpus")) is not None and taking.get("engine_num_cpus") is None:
        taking.put("engine_num_cpus", cpus)
    if (gpus := options.get("num_gpus", 0)) not in (0, 1, taking.num_ranks):
        taking.unsupported(f"{path}.num_gpus", gpus, "an engine takes a whole GPU for each rank, and no more")
    if (kind := options.get("accelerator_type")) is not None and taking.on_gpu:
        taking.put("engine_accelerator_type", kind)
    known = {"num_cpus", "num_gpus", "accelerator_type", "runtime_env"}
    taking.leave_out_rest(path, options, known, "an engine replica reserves CPUs and a GPU alone")
