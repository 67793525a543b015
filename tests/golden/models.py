"""Owns the models and token sequences of the golden gate, and executors for them.
Never downloads: the default model is packaged, the others are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig
from engine.execution.executor import TorchExecutor
from tests.golden.prompts import PROMPTS
from tests.support.tiny_models import DISTINCT_FAMILIES, VOCAB

FAMILIES = ("qwen2", "qwen3", "llama3", "yarn", *DISTINCT_FAMILIES)


def tokenized_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(prepare_model(DEFAULT_MODEL) / "tokenizer.json"))
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in PROMPTS]


def family_sequences() -> list[list[int]]:
    """Return random tokens; lengths are around block edges, and beyond the 64 positions that llama3 and yarn extend."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (2, 15, 16, 17, 63, 64, 65, 180)
    ]


def make_executor(directory: Path, dtype: str, **settings: Any) -> tuple[TorchExecutor, ResolvedConfig]:
    return create_executor(directory, EngineConfig(dtype=dtype, num_kv_blocks=160, **settings))  # type: ignore[arg-type]
