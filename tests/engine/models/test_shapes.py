"""Contracts of the shapes that benchmarks and GPU tests run without a checkpoint: they have the sizes that their names
promise.
Never allocates a weight: the counts follow from the config alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import engine.models
from engine.models.config import ModelConfig, read_model_config
from engine.models.parameters import allocate, checkpoint_table

SHAPES = Path(engine.models.__file__).parent / "shapes"
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.1": 7_241_732_096,
    "gemma-3-1b": 999_885_952,
    "smollm3-3b": 3_075_098_624,
    "phi-3-mini-4k": 3_821_079_552,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464,
}
"""The counts of the models' own cards, with tied embeddings once. Those of hybrids are transformers' counts, because
their cards include towers and layers that the decoder does not have."""


def count(config: ModelConfig) -> int:
    weights = allocate(config, torch.bfloat16, torch.device("meta"))
    return sum(view.numel() for view in checkpoint_table(config, weights).values())


def test_every_shape_is_counted() -> None:
    assert sorted(path.name for path in SHAPES.iterdir()) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    config = read_model_config(SHAPES / name)
    assert count(config) == PARAMETERS[name]
    assert config.num_heads % config.num_kv_heads == 0


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_is_a_model_of_transformers_too(name: str) -> None:
    """Regression: the benchmark compares with generation by transformers, and no shape gave its type,
    so the run ended there."""
    config = AutoConfig.from_pretrained(SHAPES / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]
