"""Finds what an LLMConfig reserves for a replica: a GPU or the CPU, how much, and of what kind.
Never asks a machine."""

from __future__ import annotations

from typing import Any, get_args

from serve_app.llm_config.taking import Taking
from serve_app.settings.ranks import Placement

_TPU = "no TPU is supported"
_RENAMED = {"A10": "A10G"}
"""As Ray Serve LLM itself renames."""


def runs_on_gpu(config: dict[str, Any]) -> bool:
    """Whether the engine runs on a GPU, by the rules of Ray Serve LLM: an accelerator_config says so, or else the
    bundles of the placement group; without either, it is a GPU."""
    if isinstance(accelerator := config.get("accelerator_config"), dict) and "kind" in accelerator:
        return bool(accelerator["kind"] != "cpu")
    bundles = _bundles(config.get("placement_group_config"))
    return any(bundle.get("GPU") for bundle in bundles) if bundles else True


def read_hardware(taking: Taking, config: dict[str, Any]) -> None:
    """Read what a replica reserves: accelerator_type, accelerator_config and placement_group_config."""
    accelerator = taking.mapping("accelerator_config", config.get("accelerator_config"))
    if accelerator.get("kind") == "tpu":
        taking.unsupported("accelerator_config.kind", "tpu", _TPU)
    taking.leave_out_rest("accelerator_config", accelerator, {"kind"}, "a GPU needs no further description")
    kind = config.get("accelerator_type")
    if isinstance(kind, str) and kind.startswith("TPU"):
        taking.unsupported("accelerator_type", kind, _TPU)
    elif kind is not None and taking.on_gpu:
        taking.put("engine_accelerator_type", _RENAMED.get(kind, kind) if isinstance(kind, str) else kind)
    elif kind is not None:
        taking.leave_out("accelerator_type", kind, "the engine runs on the CPU")
    if taking.on_gpu:
        taking.put("engine_num_gpus", taking.num_ranks)
    _read_placement(taking, taking.mapping("placement_group_config", config.get("placement_group_config")))


def _read_placement(taking: Taking, group: dict[str, Any]) -> None:
    path, bundles, size = "placement_group_config", _bundles(group), taking.num_ranks
    if len(bundles) > 1 and len(bundles) != size:
        text = "a rank of tensor_parallel_size has one bundle: the first is taken for each, and more replicas use more"
        taking.unsupported(f"{path}.bundles", bundles, text)
    each = len(bundles) > 1 or bool(group.get("bundle_per_worker"))  # else all ranks share what the one bundle has
    for name, amount in (bundles[0] if bundles else {}).items():
        if name == "CPU":
            taking.put("engine_num_cpus", amount * size if each else amount)
        elif name == "GPU" and amount not in (0, 1 if each else size):
            taking.unsupported(f"{path}.GPU", amount, "an engine takes a whole GPU for each rank, and no more")
        elif str(name).startswith("accelerator_type:"):
            taking.put("engine_accelerator_type", name.partition(":")[2])
        elif name != "GPU" and amount:
            taking.leave_out(f"{path}.{name}", amount, "an engine replica reserves CPUs and a GPU alone")
    known = {"bundles", "bundle_per_worker"}
    if size > 1 and (strategy := str(group.get("strategy", "")).lower()) in get_args(Placement):
        taking.put("tensor_parallel_placement", strategy)
        known.add("strategy")
    taking.leave_out_rest(path, group, known, "an engine of one rank has nothing to place together")


def _bundles(group: Any) -> list[dict[str, Any]]:
    if not isinstance(group, dict):
        return []
    one, several = group.get("bundle_per_worker"), group.get("bundles")
    given = [one] if one else several
    return [bundle for bundle in given if isinstance(bundle, dict)] if isinstance(given, list) else []
