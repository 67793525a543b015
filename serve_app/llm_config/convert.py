"""Turns a whole LLMConfig into the settings of an application, with notes on what was not simply taken over.
Never validates the result: `AppSettings` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.llm_config.deployment import read_deployment
from serve_app.llm_config.engine import OWN, PATH, read_engine_kwargs
from serve_app.llm_config.hardware import read_hardware, runs_on_gpu
from serve_app.llm_config.model import read_environment, read_lora, read_model, read_rest
from serve_app.llm_config.taking import Taking, merge

FIELDS = (
    "accelerator_config",
    "accelerator_type",
    "callback_config",
    "deployment_config",
    "engine_kwargs",
    "experimental_configs",
    "llm_engine",
    "log_engine_metrics",
    "lora_config",
    "model_loading_config",
    "placement_group_config",
    "runtime_env",
    "server_cls",
)
"""All fields of an LLMConfig; a test compares them with the installed Ray's."""

Base = Callable[[bool], dict[str, Any]]
"""Returns the settings of a server with a GPU, or of one without, that a config is put over."""


def convert(config: Mapping[str, Any], base: Base) -> Taking:
    """Read an LLMConfig as the `args` of an application of our own."""
    return _convert(config, base, own_app=True)


def convert_engine(config: Mapping[str, Any], base: Base) -> Taking:
    """Read what an LLMConfig says of the model and its engine alone, for a replica that Ray Serve LLM deploys, scales
    and routes to by the same config."""
    return _convert(config, base, own_app=False)


def _convert(config: Mapping[str, Any], base: Base, *, own_app: bool) -> Taking:
    given = {name: value for name, value in config.items() if value is not None}
    taking = Taking(runs_on_gpu(given), own_app)
    below = base(taking.on_gpu)
    # A parser that was not asked for would take thoughts out of the text, where clients of vLLM read them.
    taking.put("reasoning_parser", "none")
    read_model(taking, given)
    read_environment(taking, given.get("runtime_env"))
    kwargs = taking.mapping(PATH, given.get(PATH))
    taking.own = taking.mapping(f"{PATH}.{OWN}", kwargs.get(OWN))
    read_engine_kwargs(taking, kwargs, below.get("engine", {}))
    for read in (read_lora, read_hardware, read_rest, *((read_deployment,) if own_app else ())):
        read(taking, given)
    for name, value in given.items():
        if name not in FIELDS:
            taking.unsupported(name, value, "Ray Serve LLM has no such field")
    taking.args = merge(merge(below, taking.args), taking.own)
    return taking
