"""Owns the models and token sequences of the golden gate, and executors for them.
Never downloads: the default model is packaged, the others are made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig
from engine.execution.executor import TorchExecutor
from tests.golden.prompts import PROMPTS
from tests.support.tiny_models import DISTINCT_FAMILIES, VOCAB

SHALLOW_LAYERS = 6
FAMILIES = ("qwen2", "qwen3", "llama3", "yarn", *DISTINCT_FAMILIES)


def tokenized_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(prepare_model(DEFAULT_MODEL) / "tokenizer.json"))
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in PROMPTS]


def save_shallow_model(directory: Path) -> None:
    """Write the default model with its first layers alone. It says nothing sensible, in real tokens and with real
    weights, in a third of the time: enough where its text is compared with its own."""
    whole = prepare_model(DEFAULT_MODEL)
    shutil.copytree(whole, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((whole / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": SHALLOW_LAYERS}))
    with safe_open(whole / "model.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        kept = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - it is no dict
            if _layer_of(name) < SHALLOW_LAYERS
        }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def _layer_of(name: str) -> int:
    """-1: of none."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def family_sequences() -> list[list[int]]:
    """Return random tokens; lengths are around block edges, and beyond the 64 positions that llama3 and yarn extend."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (2, 15, 16, 17, 63, 64, 65, 180)
    ]


def make_executor(directory: Path, dtype: str, **settings: Any) -> tuple[TorchExecutor, ResolvedConfig]:
    return create_executor(directory, EngineConfig(dtype=dtype, num_kv_blocks=160, **settings))  # type: ignore[arg-type]
