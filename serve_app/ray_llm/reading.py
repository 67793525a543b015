"""Reads the LLMConfig that a server class gets: its settings, and its deployment's share of a machine.
Never takes a value silently: what has no counterpart here is refused or logged, each by name."""

from __future__ import annotations

import copy
import logging
from typing import Any

from pydantic import ValidationError

from serve_app.front.command.base_config import base_config
from serve_app.llm_config.convert import convert, convert_engine
from serve_app.llm_config.engine import OWN, PATH
from serve_app.llm_config.taking import Kind, Taking
from serve_app.settings.application import AppSettings

logger = logging.getLogger(__name__)

OWN_SETTINGS = (
    "admission",
    "default_sampling",
    "engine",
    "hang_timeout_s",
    "images",
    "lora_adapters",
    "max_body_bytes",
    "pooling",
    "reasoning_parser",
    "sse_keep_alive_s",
    "strict",
    "tool_parser",
    "tracing",
)
"""The settings of an application that have an effect in a replica of Ray Serve LLM."""
_PLACED_BY_RAY = ("placement_group_bundles", "placement_group_strategy")
_ROUTER = "request_router_config"


def read_settings(llm_config: Any) -> AppSettings:
    """Read an LLMConfig as settings, and log what was not simply taken over.

    Raises:
        ValueError: the replica could not do what the config asks for; a line for each reason.
    """
    taking = _taken(llm_config)
    for note in taking.notes:
        logger.warning("LLMConfig %s: %s", llm_config.model_id, note)
    replicas = convert(_as_mapping(llm_config), _base).args  # by which engines share the cores of a machine
    shared = {name: replicas[name] for name in ("engine_replicas", "autoscaling") if name in replicas}
    try:
        return AppSettings.model_validate(taking.args | shared)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        raise ValueError(_refusal(llm_config, lines)) from error


def deployment_options(llm_config: Any) -> dict[str, Any]:
    """Return the options of the deployment, which is one process: it needs no placement group.

    Raises:
        ValueError: as for `read_settings`.
    """
    taking = _taken(llm_config)
    options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
    given = options.get("ray_actor_options") or {}
    actor = {"num_cpus": 1, **given, "num_gpus": taking.get("engine_num_gpus") or 0}
    for name, setting in (("num_cpus", "engine_num_cpus"), ("accelerator_type", "engine_accelerator_type")):
        if (value := _in_config(llm_config, setting)) is not None:
            actor[name] = value
    environment = {**(given.get("runtime_env") or {}), **(llm_config.runtime_env or {})}
    if environment:
        actor["runtime_env"] = environment
    return options | {"ray_actor_options": actor}


def _in_config(llm_config: Any, setting: str) -> Any:
    """Return a setting that the config itself says, without the base below it."""
    return convert(_as_mapping(llm_config), lambda _: {}).get(setting)


def _taken(llm_config: Any) -> Taking:
    taking = convert_engine(_as_mapping(llm_config), _base)
    lines = [f"{note.path}: {note.text}" for note in taking.notes if note.kind is Kind.NOT_SUPPORTED]
    own = llm_config.engine_kwargs.get(OWN) or {}
    lines += [
        f"{PATH}.{OWN}.{name}: it has no effect behind Ray Serve LLM's ingress; expected one of "
        f"{', '.join(OWN_SETTINGS)}"
        for name in own
        if name not in OWN_SETTINGS
    ]
    deployment = llm_config.deployment_config
    lines += [
        f"deployment_config.{name}: set placement_group_config instead, as in Ray Serve LLM"
        for name in _PLACED_BY_RAY
        if name in deployment
    ]
    if "KVAwareRouter" in repr(deployment.get(_ROUTER)):
        lines.append(f"deployment_config.{_ROUTER}: KVAwareRouter reads the events of vLLM's KV cache")
    if lines:
        raise ValueError(_refusal(llm_config, lines))
    taking.notes = [note for note in taking.notes if note.kind is not Kind.NOT_SUPPORTED]
    return taking


def _refusal(llm_config: Any, lines: list[str]) -> str:
    return "\n".join(f"LLMConfig {llm_config.model_id}: {line}" for line in lines)


def _as_mapping(llm_config: Any) -> dict[str, Any]:
    written: dict[str, Any] = llm_config.model_dump(exclude_unset=True, warnings=False)
    return written


def _base(on_gpu: bool) -> dict[str, Any]:
    args: dict[str, Any] = base_config("", on_gpu=on_gpu)["applications"][0]["args"]
    return args
