"""Owns the comparison of greedy answers on a GPU with those of transformers there, token for token.
Never downloads: transformers saves a small random model, and the engine reads its files straight to the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig
from engine.execution.device import Device
from engine.protocol import SamplingParams
from tests.golden.bench import Bench

pytestmark = pytest.mark.gpu

VOCAB, ANSWER = 1000, 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
GENERATOR = torch.Generator().manual_seed(17)
PROMPTS = [torch.randint(0, VOCAB, (length,), generator=GENERATOR).tolist() for length in (1, 15, 16, 17, 100, 250)]


@pytest.fixture(scope="module")
def reference(device: Device, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Return a model's directory, and its answers by transformers on the device."""
    transformers = pytest.importorskip("transformers", reason="transformers cannot be imported")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("qwen3", **SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    model, answers = model.to(device.torch_device), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device.torch_device)
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0
        )
        answers.append(text[0, len(prompt) :].tolist())
    return directory, answers


@pytest.mark.parametrize(("attention", "graphs"), [("torch", "none"), ("triton", "none"), ("triton", "all")])
def test_greedy_answers_are_those_of_transformers(
    reference: tuple[Path, list[list[int]]], attention: str, graphs: str
) -> None:
    """In float32: a different order of summation must not decide a near tie."""
    directory, want = reference
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    settings |= {"num_kv_blocks": 200, "num_speculative_tokens": 0, "attention": attention, "cuda_graphs": graphs}
    try:
        executor, resolved = create_executor(directory, EngineConfig(device="cuda", dtype="float32", **settings))
    except ConfigError as error:
        if "cannot run" in str(error):
            pytest.skip(str(error))
        raise
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    assert Bench(executor, resolved, PROMPTS).serve(PROMPTS, params) == want
    executor.shutdown()
