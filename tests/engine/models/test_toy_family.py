"""Owns the proof that a model family is added as engine/models/README.md says: by one file, and without other changes.
Never touches the families that are served: the toy is in the table for one test at a time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GemmaConfig, GemmaForCausalLM

import engine.models
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.models.config import CheckpointError, read_model_config
from engine.models.description import ModelConfig
from engine.models.family import ModelFamily
from engine.models.fields import expect, read_decoder
from engine.models.registry import FAMILIES
from engine.models.values import Fields
from engine.models.weights import load_weights
from kernels.forward import GELU
from tests.support.plans import forced_logits
from tests.support.tiny_models import SHAPE, VOCAB

README = Path(engine.models.__file__).parent / "README.md"
TOKENS = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS = (9, 3, 11, 0, 7)

# --- what README.md shows -----------------------------------------------------------------------------------------

NAMES = {
    "wte": "embedding",
    "final_norm": "norm",
    "blocks.{layer}.norm_1": "input_norm",
    "blocks.{layer}.attention.qkv": "qkv",
    "blocks.{layer}.attention.out": "output",
    "blocks.{layer}.norm_2": "mlp_norm",
    "blocks.{layer}.mlp.gate": "gate",
    "blocks.{layer}.mlp.up": "up",
    "blocks.{layer}.mlp.down": "down",
}


def _toy(raw: Fields) -> ModelConfig:
    expect(raw, "activation", "gelu")
    config = read_decoder(raw, tied=True)
    return replace(config, activation=GELU, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


TOY = ModelFamily("ToyForCausalLM", _toy, NAMES)

# --- end of it ----------------------------------------------------------------------------------------------------


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GemmaForCausalLM:
    """Make a model of the toy family: it is the first Gemma, which is not served, under other names.
    Its checkpoint is in tmp_path."""
    torch.manual_seed(7)
    model = GemmaForCausalLM(GemmaConfig(**SHAPE, hidden_act="gelu_pytorch_tanh")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) - 0.5)
    save_file(toy_tensors(model), tmp_path / "model.safetensors")
    write_config(tmp_path)
    monkeypatch.setitem(FAMILIES, TOY.architecture, TOY)
    return model


def write_config(directory: Path, **changes: Any) -> None:
    fields = SHAPE | {"architectures": [TOY.architecture], "activation": "gelu"} | changes
    (directory / "config.json").write_text(json.dumps(fields))


def toy_tensors(model: GemmaForCausalLM) -> dict[str, torch.Tensor]:
    found = {"wte.weight": model.model.embed_tokens.weight, "final_norm.weight": model.model.norm.weight}
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = {
            "norm_1": layer.input_layernorm.weight,
            "attention.qkv": torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
            "attention.out": attention.o_proj.weight,
            "norm_2": layer.post_attention_layernorm.weight,
            "mlp.gate": mlp.gate_proj.weight,
            "mlp.up": mlp.up_proj.weight,
            "mlp.down": mlp.down_proj.weight,
        }
        found |= {f"blocks.{number}.{name}.weight": tensor for name, tensor in parts.items()}
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def test_a_family_of_one_file_gives_the_logits_of_its_model(reference: GemmaForCausalLM, tmp_path: Path) -> None:
    with torch.inference_mode():
        want = reference(torch.tensor([TOKENS])).logits[0].float()
    executor, _ = create_executor(tmp_path, EngineConfig(dtype="float32", num_kv_blocks=12, num_threads=1))
    for size in (1, 16, None):
        torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, size), want, atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("reference")
def test_what_a_family_does_not_compute_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    write_config(tmp_path, activation="relu")
    with pytest.raises(CheckpointError, match=r"config\.json: activation 'relu' is not supported; supported is 'gelu'"):
        read_model_config(tmp_path)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_name_that_a_family_forgets_is_a_bug_that_shows_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that nobody fills would hold whatever was in memory."""
    less = {key: place for key, place in NAMES.items() if key != name}
    monkeypatch.setitem(FAMILIES, TOY.architecture, replace(TOY, names=less))
    with pytest.raises(AssertionError, match="ToyForCausalLM names"):
        load_weights(tmp_path, read_model_config(tmp_path), torch.float32)


def test_without_its_row_in_the_table_it_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match=f"ToyForCausalLM is not supported; supported are {', '.join(FAMILIES)}"):
        read_model_config(tmp_path)


def test_the_readme_shows_this_very_family() -> None:
    own = Path(__file__).read_text(encoding="utf-8")
    shown = own.split("# --- what README.md shows")[1].split("\n", 1)[1].split("# --- end of it")[0].strip()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert any(shown in block for block in blocks), shown
