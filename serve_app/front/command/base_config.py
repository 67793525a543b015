"""Owns the config of a server that is started by a model's name alone: config.yaml's choices, or config.gpu.yaml's.
Never has a limit that depends on the model or on the machine's memory: those are left to the engine."""

from __future__ import annotations

import copy
from typing import Any

from serve_app.front.preflight import BUILDER

_SERVED: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "logging_config": {"enable_access_log": False},
    "applications": [{"name": "chunkserve", "route_prefix": "/", "import_path": BUILDER}],
}
_ON_CPU: dict[str, Any] = {"engine": {"targets": {"tpot_ms": 75, "ttft_ms": 2000}}}
_ON_GPU: dict[str, Any] = {
    "engine_num_gpus": 1,
    "engine_num_cpus": 2,
    "engine": {
        "device": "cuda",
        "overlap": True,
        "block_size": 64,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
    },
}


def base_config(model: str, *, on_gpu: bool) -> dict[str, Any]:
    """Return a Serve config with one application that serves `model`."""
    config = copy.deepcopy(_SERVED)
    config["applications"][0]["args"] = {"model": model, **copy.deepcopy(_ON_GPU if on_gpu else _ON_CPU)}
    return config
