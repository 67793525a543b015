"""Owns Ray Serve LLM as a server to compare with: one vLLM engine on the CPU behind Serve's proxy, in one session.
Never runs in this project's environment: it takes the Python of the peers' (env.sh)."""

from __future__ import annotations

import argparse
import signal
from threading import Event
from typing import Any

import ray
from ray import serve

NUM_CPUS = 8
"""What Ray may hand out, which is no claim on cores: its replicas and their placement group do not fit two."""


def config(model_dir: str, max_model_len: int, environment: dict[str, str]) -> Any:
    """`environment`: of the engine's processes, which is how vLLM's CPU build is set up."""
    from ray.serve.llm import LLMConfig  # of the peers' environment, which `--help` does without

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
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_end.set())  # after Ray, which sets its own
    serve.start(proxy_location="HeadOnly", http_options=dict(host="127.0.0.1", port=int(port)))
    environment = dict(variable.split("=", 1) for variable in variables)
    llm = config(model_dir, int(max_model_len), environment)
    serve.run(build_openai_app({"llm_configs": [llm]}), route_prefix="/")
    asked_to_end.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Serve a model with Ray Serve LLM on this machine, for loadtest.peers to measure."
    )
    for each in ("model_dir", "max_model_len", "port"):
        parser.add_argument(each)
    parser.add_argument("variables", nargs="*", metavar="NAME=VALUE")
    given = parser.parse_args()
    main(given.model_dir, given.max_model_len, given.port, *given.variables)
