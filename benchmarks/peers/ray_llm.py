"""Owns Ray Serve LLM as a server to compare with: one vLLM engine on the CPU behind Serve's proxy, in one session.
Never runs in this project's environment: it needs the Python of the peers' environment (env.sh)."""

from __future__ import annotations

import argparse
import signal
from threading import Event
from typing import Any

import ray
from ray import serve

NUM_CPUS = 8
"""CPUs that Ray may hand out. This reserves no cores; the replicas and their placement group would not fit two."""


def config(model_dir: str, max_model_len: int, environment: dict[str, str]) -> Any:
    """`environment` is for the engine's processes; it configures vLLM's CPU build."""
    from ray.serve.llm import LLMConfig  # only in the peers' environment; `--help` works without it

    return LLMConfig(
        model_loading_config=dict(model_id="peer", model_source=model_dir),
        deployment_config=dict(autoscaling_config=dict(min_replicas=1, max_replicas=1)),
        engine_kwargs=dict(max_model_len=max_model_len, dtype="bfloat16"),
        placement_group_config=dict(bundles=[{"CPU": 1}]),
        accelerator_type=None,
        runtime_env=dict(env_vars=environment),
    )


def main(model_dir: str, max_model_len: str, port: str, *variables: str) -> None:
    """Serve until SIGTERM; `variables` are NAME=VALUE."""
    from ray.serve.llm import build_openai_app

    asked_to_end = Event()
    ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=False)
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_end.set())  # ray.init sets its own handler
    serve.start(proxy_location="HeadOnly", http_options=dict(host="127.0.0.1", port=int(port)))
    environment = dict(variable.split("=", 1) for variable in variables)
    llm = config(model_dir, int(max_model_len), environment)
    serve.run(build_openai_app({"llm_configs": [llm]}), route_prefix="/")
    asked_to_end.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Serve a model with Ray Serve LLM on this machine, for benchmarks.peers.run to measure."
    )
    for argument in ("model_dir", "max_model_len", "port"):
        parser.add_argument(argument)
    parser.add_argument("variables", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args()
    main(options.model_dir, options.max_model_len, options.port, *options.variables)
