"""Makes `ray.serve.llm` importable where vLLM is not installed: with stand-ins for the types that it takes from there.
Never hides what is installed: where vLLM is, nothing stands in."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from loadtest.server import ROOT

STAND_INS = Path(__file__).parent / "ray_llm_types"
SERVER = "serve_app.ray_llm:ChunkserveServer"
ON_CPU: dict[str, Any] = {"placement_group_config": {"bundle_per_worker": {"CPU": 0.5}}}
"""What an LLMConfig says where there is no GPU."""
FAKE: dict[str, Any] = {"executor": "fake"}


def stand_ins() -> list[str]:
    return [] if find_spec("vllm") else [str(STAND_INS)]


@contextmanager
def importable() -> Iterator[None]:
    """Let ray.serve.llm be imported and used in the block. Afterwards nothing imports a stand-in, and the root logger
    is as it was: Ray Serve LLM replaces its handlers, those of pytest among them."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    before = list(sys.path)
    sys.path += stand_ins()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.path[:] = before
        for name, loaded in list(sys.modules.items()):
            if str(STAND_INS) in str(getattr(loaded, "__file__", "")):
                del sys.modules[name]


def import_ray_llm(name: str = "ray.serve.llm") -> Any:
    """Import a module of Ray Serve LLM."""
    with importable():
        return import_module(name)


def ingress_fails() -> str | None:
    """Say why the ingress of Ray Serve LLM cannot answer here; None if it can. From FastAPI 0.137 on routes are read in
    the replica, where Ray's note on the parameter `self` is lost, so that each request is a 400."""
    installed = version("fastapi")
    if tuple(map(int, installed.split(".")[:2])) < (0, 137):
        return None
    return f"Ray 2.60's own ingress of LLMs refuses every request with FastAPI {installed}; it needs one below 0.137"


def environment() -> dict[str, str]:
    """Return the variables of a server's process in which ray.serve.llm can be imported."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), *stand_ins()]
    return {"PYTHONPATH": os.pathsep.join(paths), "RAY_SERVE_ENABLE_HA_PROXY": "0"}


def ray_config(*models: dict[str, Any]) -> dict[str, Any]:
    """Return a Serve config of Ray Serve LLM's own builder."""
    args = {"llm_configs": list(models), "ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0.25}}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1"},
        "applications": [
            {"name": "llm", "route_prefix": "/", "import_path": "ray.serve.llm:build_openai_app", "args": args}
        ],
    }


def llm_config(**fields: Any) -> Any:
    """Make an LLMConfig of the installed Ray, with our server class and without a GPU."""
    return import_ray_llm().LLMConfig(**{"server_cls": SERVER, **ON_CPU, **fields})


def written(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path
