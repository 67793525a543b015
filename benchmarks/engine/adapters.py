"""Owns the LoRA adapters of measurements: random ones of every module that may be adapted, in executors' memory.
Never measures: whoever has executors does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from engine.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE, places_of
from engine.models.config import read_model_config
from engine.models.description import ModelConfig
from engine.step import Executor, StepPlan


def keep_random(executors: Iterable[Executor], model_dir: Path, count: int, rank: int, seed: int) -> list[str]:
    """Keep `count` random adapters in each executor; return their digests."""
    model, generator, executors = read_model_config(model_dir), torch.Generator().manual_seed(seed), list(executors)
    found = []
    for _ in range(count):
        with TemporaryDirectory() as directory:
            _save(model, Path(directory), rank, generator)
            for executor in executors:
                host = executor.capabilities.adapters
                assert host is not None
                digest, weights = host.read(directory)
                host.keep(digest, weights)
        found.append(digest)
    return found


def _save(model: ModelConfig, directory: Path, rank: int, generator: torch.Generator) -> None:
    tensors = {}
    for name, place in places_of(model).items():
        for side, shape in {"A": (rank, place.inputs), "B": (place.outputs, rank)}.items():
            drawn = torch.randn(*shape, generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = drawn.bfloat16()
    save_file(tensors, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def in_turn(plan: StepPlan, digests: Sequence[str]) -> StepPlan:
    """Give the rows the adapters one after another."""
    rows = (row._replace(adapter=digests[i % len(digests)]) for i, row in enumerate(plan.rows))
    return replace(plan, rows=tuple(rows))
