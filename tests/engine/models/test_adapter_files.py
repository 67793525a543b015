"""Contracts of reading LoRA adapters: PEFT's files as they are, and everything else refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig
from engine.models.adapter_files import Deltas, read_adapter
from engine.models.config import read_model_config
from engine.step import AdapterError
from tests.support.tiny_adapters import ATTENTION, FUSED, MLP, save_adapter
from tests.support.tiny_models import make_model, save_model
from tests.support.tiny_vision import save_vision_model

Q = "base_model.model.model.layers.1.self_attn.q_proj"


def read(
    directory: Path, model_dir: Path, max_rank: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[str, Deltas]:
    return read_adapter(directory, read_model_config(model_dir), dtype, max_rank)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """Return the directory of a model and that of an adapter."""
    model = save_model("llama", tmp_path / "model")
    return tmp_path / "model", save_adapter(model, tmp_path / "adapter")


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_digest_names_the_contents_and_not_the_directory(made: tuple[Path, Path], tmp_path: Path) -> None:
    model_dir, adapter = made
    model = save_model("llama", tmp_path / "again")
    first, _ = read(adapter, model_dir)
    assert read(save_adapter(model, tmp_path / "copy"), model_dir)[0] == first
    assert read(save_adapter(model, tmp_path / "other", seed=9), model_dir)[0] != first
    edit(adapter, lora_alpha=1)
    assert read(adapter, model_dir)[0] != first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"a_key_of_next_year": 3}, "a_key_of_next_year is 3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, "r is 0"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 17}, r"r is 17, and this engine takes ranks up to 16 \(max_lora_rank\)"),
        ({"r": 3}, r"down_proj.lora_A.weight has shape \[4, 80\], but r and this model's shape say \[3, 80\]"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ],
)
def test_what_an_adapter_says_and_is_not_computed_is_refused_by_its_key(
    made: tuple[Path, Path], change: dict[str, Any], says: str
) -> None:
    edit(made[1], **change)
    with pytest.raises(AdapterError, match=says):
        read(made[1], made[0])


@pytest.mark.parametrize(
    ("alpha", "dtype", "holds"),
    [
        (1e300, torch.float32, "float32 holds none beyond 3.40282e+38"),
        (-1e300, torch.float32, "float32 holds none beyond 3.40282e+38"),
        (1e9, torch.float16, "float16 holds none beyond 65504"),
    ],
)
def test_a_lora_alpha_that_makes_weights_infinite_is_refused_by_its_key(
    made: tuple[Path, Path], alpha: float, dtype: torch.dtype, holds: str
) -> None:
    """Regression: it was taken, and each answer failed."""
    edit(made[1], lora_alpha=alpha)
    with pytest.raises(AdapterError, match=re.escape(f"lora_alpha is {alpha}") + rf".*lora_B.*{re.escape(holds)}"):
        read(made[1], made[0], dtype=dtype)


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_number_that_the_model_s_dtype_does_not_hold_is_refused_by_its_tensor(
    made: tuple[Path, Path], side: str
) -> None:
    path = made[1] / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{Q}.lora_{side}.weight"][0, 0] = 1e5
    save_file(tensors, path)
    assert read(made[1], made[0], dtype=torch.bfloat16)[1]
    with pytest.raises(
        AdapterError, match=rf"layers\.1\.self_attn\.q_proj\.lora_{side}.*float16 holds none beyond 65504"
    ):
        read(made[1], made[0], dtype=torch.float16)


@pytest.mark.parametrize("start", [False, None, "gaussian", "eva", "orthogonal"])
def test_an_adapter_whose_first_numbers_left_the_model_as_it_was_is_read(made: tuple[Path, Path], start: Any) -> None:
    edit(made[1], init_lora_weights=start)
    assert read(made[1], made[0])[1]


def test_an_adapter_of_the_model_without_its_head_is_that_of_the_same_modules(tmp_path: Path) -> None:
    """As PEFT saves those for embeddings. Regression: the first tensor was refused by its name."""
    model = save_model("llama", tmp_path / "model")
    model.model.save_pretrained(tmp_path / "base")
    _, wanted = read(save_adapter(model, tmp_path / "adapter"), tmp_path / "model")
    adapter = save_adapter(model.model, tmp_path / "of_base", task_type="FEATURE_EXTRACTION")
    for served in ("model", "base"):
        _, found = read(adapter, tmp_path / served)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key].b, delta.b) for key, delta in wanted.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "layers.1.self_attn.q_proj has lora_A but lacks lora_B"),
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "layers.1.self_attn.q_proj has lora_B but lacks lora_A"),
        (
            lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(3)}),
            "lora_magnitude_vector is not supported for",
        ),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)}), "lm_head.lora_A"),
        (lambda t: t.update({Q.replace("1", "7") + ".lora_A.weight": torch.ones(4, 48)}), "layers.7.self_attn"),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(96, 5)}), r"shape \[96, 5\], but .* \[96, 4\]"),
        (lambda t: t[f"{Q}.lora_B.weight"].fill_(torch.inf), "contains NaN or infinity"),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(96, 4).int()}), "is int32: expected floating-point"),
        (lambda t: t.clear(), "holds no tensor"),
    ],
)
def test_a_tensor_that_fits_nothing_is_refused_by_its_name(
    made: tuple[Path, Path], change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    path = made[1] / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=says):
        read(made[1], made[0])


def test_what_is_no_adapter_is_refused_by_its_file(made: tuple[Path, Path], tmp_path: Path) -> None:
    model_dir, adapter = made
    with pytest.raises(AdapterError, match="no such directory"):
        read(tmp_path / "nowhere", model_dir)
    (adapter / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(AdapterError, match="not a readable safetensors file"):
        read(adapter, model_dir)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors cannot be read"):
        read(adapter, model_dir)
    (adapter / "adapter_model.safetensors").touch()
    for text in ("{", "[" * 100_000):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterError, match="is not JSON"):
            read(adapter, model_dir)


def test_an_adapter_of_a_model_of_another_shape_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_model("qwen3", tmp_path / "other")  # of another head_dim
    with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.k_proj\.lora_B\.weight has shape \[96, 4\]"):
        read(save_adapter(other, tmp_path / "theirs", modules=ATTENTION), made[0])


def test_an_expert_has_no_adapters_but_its_layer_s_attention_has(tmp_path: Path) -> None:
    model = save_model("qwen3_moe", tmp_path / "model")  # its middle layer has a dense MLP
    _, deltas = read(save_adapter(model, tmp_path / "dense", modules=ATTENTION), tmp_path / "model")
    assert sorted(deltas) == [(layer, stack) for layer in range(3) for stack in ("output", "qkv")]
    theirs = save_adapter(make_model("llama"), tmp_path / "mlp", modules=MLP)  # on the MLPs of all layers
    with pytest.raises(
        AdapterError, match=r"layers\.[02]\.mlp.* is not supported for .* attention and dense-MLP projections"
    ):
        read(theirs, tmp_path / "model")


def test_what_is_added_to_a_stack_is_beside_its_own_part_alone(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    _, deltas = read(save_adapter(model, tmp_path / "v", modules=("v_proj", "up_proj")), tmp_path / "model")
    assert sorted(deltas) == [(layer, stack) for layer in range(3) for stack in ("gate_up", "qkv")]
    for delta in deltas.values():
        assert delta.a.shape == (4, 48)
    v, up = deltas[0, "qkv"].b, deltas[0, "gate_up"].b
    assert v.shape == (96 + 32 + 32, 4)
    assert up.shape == (160, 4)
    assert not v[:128].any()
    assert not up[:80].any()
    assert v[128:].all()
    assert up[80:].all()


def test_a_checkpoint_with_stacked_projections_has_adapters_on_them_whole(tmp_path: Path) -> None:
    model = save_model("phi3", tmp_path / "model")
    _, deltas = read(save_adapter(model, tmp_path / "adapter", modules=FUSED), tmp_path / "model")
    assert sorted(deltas) == [(layer, stack) for layer in range(3) for stack in ("down", "gate_up", "output", "qkv")]


# --- engines that can have none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_a_family_with_linear_attention_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    with pytest.raises(ConfigError, match=r"max_loras is 2, .*: adapters are not computed for linear attention"):
        create_executor(tmp_path, EngineConfig(max_loras=2, num_kv_blocks=8))


def test_a_model_with_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    with pytest.raises(ConfigError, match=r"max_loras is 2, .*: adapters are not computed for models with an encoder"):
        create_executor(tmp_path, EngineConfig(max_loras=2, num_kv_blocks=8))
