"""Owns tiny random LoRA adapters, written as PEFT writes them, and models that they are merged into.
Never shares code with the engine: what an adapter does is defined here once more, by the weights that it adds to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
RANK = 4
_FACTOR = ".lora_{}.weight"


def save_adapter(
    model: PreTrainedModel,
    directory: Path,
    *,
    seed: int = 0,
    rank: int = RANK,
    modules: Sequence[str] = ATTENTION + MLP,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """Save an adapter for `model`, on its modules of these names. `config` has further keys of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules and isinstance(module, torch.nn.Linear):
            outputs, inputs = module.weight.shape
            factors = {"A": torch.randn(rank, inputs, generator=generator) * inputs**-0.5}
            factors["B"] = torch.randn(outputs, rank, generator=generator) * size
            tensors |= {f"base_model.model.{name}{_FACTOR.format(side)}": value for side, value in factors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": list(modules),
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "megatron_core": "megatron.core",
    }
    (directory / "adapter_config.json").write_text(json.dumps(told | config))
    return directory


def _factors(model: PreTrainedModel, directory: Path) -> Iterator[tuple[torch.nn.Module, Tensor, Tensor]]:
    """Yield each adapted module of `model` with A, and scale * B."""
    config = json.loads((directory / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors = load_file(directory / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if name.endswith(_FACTOR.format("A")):
            b = tensors[name.replace(_FACTOR.format("A"), _FACTOR.format("B"))]
            yield modules[name.removeprefix("base_model.model.").removesuffix(_FACTOR.format("A"))], a, scale * b


def merged(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return a copy of `model` whose weights are W + scale * B A."""
    copy = deepcopy(model)
    with torch.no_grad():
        for module, a, b in _factors(copy, directory):
            module.weight.add_(b @ a)
    return copy


def beside(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return a copy of `model` that computes W x and scale * B A x separately
    and adds them, all in its own type, as PEFT does."""
    copy = deepcopy(model)
    for module, a, b in _factors(copy, directory):
        first, second = a.to(module.weight.dtype), b.to(module.weight.dtype)

        def add(_: object, given: tuple[Tensor], y: Tensor, a: Tensor = first, b: Tensor = second) -> Tensor:
            return y + given[0] @ a.T @ b.T

        module.register_forward_hook(add)
    return copy
