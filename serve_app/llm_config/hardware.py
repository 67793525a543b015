"""Finds what an LLMConfig reserves for a replica: a GPU or the CPU, how much, and of what kind.
Never asks a machine."""

from __future__ import annotations

from typing import Any

from serve_app.llm_config.taking import Taking

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
        taking.put("engine_num_gpus", 1)
    _read_placement(taking, taking.mapping("placement_group_config", config.get("placement_group_config")))


def _read_placement(taking: Taking, group: dict[str, Any]) -> None:
    path, bundles = "placement_group_config", _bundles(group)
    if len(bundles) > 1:
        text = "an engine is one process on one node: it gets the first bundle, and more replicas use more"
        taking.unsupported(f"{path}.bundles", bundles, text)
    for name, amount in (bundles[0] if bundles else {}).items():
        if name == "CPU":
            taking.put("engine_num_cpus", amount)
        elif name == "GPU" and amount not in (0, 1):
            taking.unsupported(f"{path}.GPU", amount, "an engine takes a whole GPU, and no more than one")
        elif str(name).startswith("accelerator_type:"):
            taking.put("engine_accelerator_type", name.partition(":")[2])
        elif name != "GPU" and amount:
            taking.leave_out(f"{path}.{name}", amount, "an engine replica reserves CPUs and a GPU alone")
    known = {"bundles", "bundle_per_worker"}
    taking.leave_out_rest(path, group, known, "an engine is one process, so there is nothing to place together")


def _bundles(group: Any) -> list[dict[str, Any]]:
    if not isinstance(group, dict):
        return []
    one, several = group.get("bundle_per_worker"), group.get("bundles")
    given = [one] if one else several
    return [bundle for bundle in given if isinstance(bundle, dict)] if isinstance(given, list) else []
