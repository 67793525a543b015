"""Owns LoRA adapters of models in parts: ranks read the same files, and together add what the adapter says.
Never starts a process: ranks are threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.adapter_files import read_factors
from engine.step import AdapterError
from tests.engine.models.test_shards import BLOCKS, TOKENS, distance, parts
from tests.support.distances import is_within
from tests.support.rank_threads import Ranks
from tests.support.tiny_adapters import ATTENTION, FUSED, MLP, save_adapter
from tests.support.tiny_models import save_model


@pytest.mark.parametrize(("kind", "size"), [("llama", 4), ("phi3", 3), ("gemma3", 2)])
def test_ranks_with_an_adapter_answer_as_the_whole_model_with_it(kind: str, size: int, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter", modules=FUSED if kind == "phi3" else ATTENTION + MLP)
    answers = []
    for number in (1, size):
        ranks = Ranks(tmp_path / "model", number)
        digests = []
        for one in ranks.models:
            digest, weights = one.adapters.read(str(adapter))
            one.adapters.keep(digest, weights)
            digests.append(digest)
        assert len(set(digests)) == 1, "plans name it by one digest"
        plain = ranks.prompt(TOKENS, BLOCKS)
        answers.append(ranks.prompt(TOKENS, BLOCKS, adapter=digests[0]))
        assert distance(answers[-1], plain) > 0.01
    assert is_within(distance(answers[1], answers[0]), 1e-4)


def test_an_adapter_of_another_shape_is_refused_with_the_whole_shape(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    save_file(tensors | {name: torch.zeros(4, 40)}, file)
    for part in parts(tmp_path / "model", 2):
        with pytest.raises(AdapterError, match=r"shape \[4, 40\], but r and this model's shape say \[4, 80\]"):
            read_factors(adapter, part, torch.float32, 8)
