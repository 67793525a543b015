"""Owns how an engine's ranks are placed: what Ray reserves for each of them, and on how many nodes they may be.
Never starts one: serve_app.replicas.ranks does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from engine.config import EngineConfig

Placement = Literal["strict_pack", "pack", "spread"]
"""Ray's names for it, in lower case."""
ONE_NODE: Placement = "strict_pack"
KIND_SHARE = 0.001
"""How much of the resource `accelerator_type:H100` Ray takes for an actor that asks for that kind of GPU."""


def ranks_of(config: EngineConfig) -> int:
    """Return how many ranks an engine has: those that compute its model together, or those that share its experts."""
    return config.tensor_parallel_size * config.expert_parallel_size


def ranks_in(engine: Mapping[str, Any]) -> int:
    """Return how many ranks an engine with these settings has, and so how many GPUs it needs. The settings are not
    checked yet: a size that is none counts as 1."""
    return math.prod(_size(engine.get(name)) for name in ("tensor_parallel_size", "expert_parallel_size"))


def _size(given: Any) -> int:
    """Read a size as the check of the settings does, which takes `"2"` and `2.0` for 2."""
    from pydantic import TypeAdapter, ValidationError  # here: the command line's options import this module

    try:
        return max(1, TypeAdapter(int).validate_python(given))
    except ValidationError:
        return 1


def setting_of(config: EngineConfig) -> str:
    """Return the setting by which an engine has several ranks."""
    return "engine.expert_parallel_size" if config.expert_parallel_size > 1 else "engine.tensor_parallel_size"


def check_ranks(size: int, num_gpus: float, placement: Placement, setting: str = "engine.tensor_parallel_size") -> None:
    """Check that `size` ranks can have their GPUs. `setting`: what says that there are so many.

    Raises:
        ValueError: `num_gpus`, of the whole replica, is not one for each rank, nor 0; or a placement was chosen for
            one rank.
    """
    if num_gpus % 1:
        raise ValueError(
            f"engine_num_gpus is {num_gpus:g}, but an engine measures and takes the memory of a whole GPU: two that "
            f"share one would each take gpu_memory_utilization of it. Use {size}, or 0 for the CPU."
        )
    if size == 1 and num_gpus > 1:
        raise ValueError(
            f"engine_num_gpus is {num_gpus:g}, but engine.tensor_parallel_size is 1: use 1 and engine_replicas for "
            f"more GPUs, or engine.tensor_parallel_size {num_gpus:g} for a model that is larger than one."
        )
    if num_gpus not in (0, size):
        raise ValueError(
            f"engine_num_gpus is {num_gpus:g}, but {setting} is {size}, and each rank has a GPU of its own: use "
            f"{size}, or 0 for the CPU."
        )
    if size == 1 and placement != ONE_NODE:
        raise ValueError(
            f"tensor_parallel_placement is {placement}, but engine.tensor_parallel_size and "
            "engine.expert_parallel_size are 1: there is nothing to place."
        )


def rank_options(size: int, num_cpus: float, num_gpus: float, kind: str | None) -> dict[str, float | str]:
    """Return the resources of each rank as options of its Ray actor: an equal part of what the replica reserves.
    `kind`: of GPU, by Ray's name for it."""
    options: dict[str, float | str] = {"num_cpus": num_cpus / size, "num_gpus": num_gpus / size}
    return options if kind is None else options | {"accelerator_type": kind}


def placement_options(size: int, options: dict[str, float | str], placement: Placement) -> dict[str, Any]:
    """Return the keywords of serve.deployment that reserve a bundle for each rank; none for a single rank. The replica
    is rank 0, and Serve places it in the first bundle."""
    if size == 1:
        return {}
    bundle = _bundle(options)
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(size)],
        "placement_group_strategy": placement.upper(),
    }


def _bundle(options: dict[str, float | str]) -> dict[str, float]:
    """Return an actor's options by the names that Ray's tables have for them. A bundle reserves something: without any
    resource Ray refuses it, and so a rank without CPUs takes a thousandth of one."""
    kind = options.get("accelerator_type")
    found = {"CPU": float(options["num_cpus"]), "GPU": float(options["num_gpus"])}
    found |= {} if kind is None else {f"accelerator_type:{kind}": KIND_SHARE}
    return {name: amount for name, amount in found.items() if amount} or {"CPU": KIND_SHARE}
