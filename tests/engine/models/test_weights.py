"""Owns the loading of checkpoints: whole, sharded, cast, random; broken ones are refused by name.
Never checks what the model computes with them: the executor's and the golden tests do."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save_model as save_shared
from transformers import LlamaForCausalLM

from engine.models.config import read_model_config
from engine.models.parameters import DecoderWeights, checkpoint_table
from engine.models.registry import FAMILIES
from engine.models.tensor_files import INDEX_FILE
from engine.models.weights import CheckpointError, dummy_weights, load_weights
from tests.support.tiny_models import KINDS, edit_config, edit_tensors, make_model, save_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_model("llama", tmp_path)
    return tmp_path


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, read_model_config(directory), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_a_checkpoint_lands_in_its_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is changed once all tensors are loaded is tested by comparing logits."""
    monkeypatch.setattr("engine.models.weights.settle", lambda *_: None)
    save_model(kind, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = read_model_config(tmp_path)
    table = checkpoint_table(config, load(tmp_path))
    used = {name for name in stored if not name.startswith(FAMILIES[config.architecture].unused)}
    assert set(table) == used - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    for name, view in table.items():
        torch.testing.assert_close(view, stored[name], rtol=0, atol=0)


def owned(layer: Any) -> list[torch.Tensor]:
    """Yield every tensor of a layer, or of a part of it, whatever fields it has."""
    found: list[Any] = [getattr(layer, part.name) for part in fields(layer)]
    parts = [part for value in found for part in (value if isinstance(value, tuple) else (value,))]
    return [
        tensor for part in parts for tensor in (owned(part) if is_dataclass(part) else (part,)) if tensor is not None
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_fills_every_element_exactly_once(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    config = read_model_config(tmp_path)
    weights = load(tmp_path)
    views = checkpoint_table(config, weights).values()
    spans = sorted((view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()) for view in views)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    everything = [tensor for layer in weights.layers for tensor in owned(layer)] + [weights.embedding, weights.norm]
    everything += [] if config.tie_word_embeddings else [weights.lm_head.weight]
    assert sum(view.numel() for view in views) == sum(tensor.numel() for tensor in everything)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    weights = load(tmp_path)
    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()


def test_a_sharded_checkpoint_loads_like_a_whole_one(checkpoint: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    save_model("llama", shards, max_shard_size="60KB")
    assert (shards / INDEX_FILE).exists()
    assert len(list(shards.glob("*.safetensors"))) > 1
    got, want = (load(directory).layers[2].qkv.weight for directory in (shards, checkpoint))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "packed"])
def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(kind: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="60KB")
    weight_map = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    name = "model.layers.2.input_layernorm.weight"
    for shard in sorted({*weight_map.values()} - {weight_map[name]}):
        save_file(load_file(tmp_path / shard) | {name: torch.zeros(48)}, tmp_path / shard)
    if kind == "packed":  # opens all files at once, although none of the matrices is packed
        edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16})
    want = load_file(tmp_path / weight_map[name])[name]
    assert torch.equal(load(tmp_path).layers[2].input_norm, want)


def test_a_tensor_in_two_files_without_an_index_is_refused_with_both_files(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    save_file(tensors, checkpoint / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, checkpoint / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: model\.norm\.weight is in a\.safetensors, too"):
        load(checkpoint)


def test_weights_are_cast_to_the_type_asked_for(checkpoint: Path) -> None:
    weights = load(checkpoint, torch.bfloat16)
    assert weights.layers[1].gate_up.weight.dtype == torch.bfloat16
    torch.testing.assert_close(weights.norm, load(checkpoint).norm.bfloat16(), rtol=0, atol=0)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    edit_tensors(checkpoint, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing from model\.safet"):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    edit_tensors(checkpoint, model__norm__weight=torch.ones(47))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[47\], but config\.json says \[48\]"):
        load(checkpoint)


def test_a_tensor_that_is_not_floating_point_is_refused(checkpoint: Path) -> None:
    edit_tensors(checkpoint, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8; supported are F64, F32, F16, BF16"):
        load(checkpoint)


def test_a_left_over_tensor_is_refused_because_the_model_would_be_another(checkpoint: Path) -> None:
    edit_tensors(checkpoint, model__layers__0__self_attn__q_proj__bias=torch.ones(48))
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(checkpoint)


def test_known_harmless_left_overs_are_ignored(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    edit_tensors(
        tmp_path,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        lm_head__weight=load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"],
    )
    load(tmp_path)


def test_a_tied_head_that_differs_from_the_stored_embedding_is_refused_and_loaded_once_it_is_not_tied(
    tmp_path: Path,
) -> None:
    """It was passed over, and transformers does not tie the two then: the model was another one."""
    save_model("llama_tied", tmp_path)
    edit_tensors(tmp_path, lm_head__weight=torch.ones(211, 48))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*set tie_word"
    ):
        load(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    ours = load(tmp_path)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(ours.embedding, theirs.model.embed_tokens.weight)


def test_a_tied_head_is_compared_in_the_type_that_is_loaded(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, lm_head__weight=stored.bfloat16())
    load(tmp_path, torch.bfloat16)
    with pytest.raises(CheckpointError, match="differs"):
        load(tmp_path)


def test_a_tied_head_that_is_stored_alone_is_the_embedding(tmp_path: Path) -> None:
    """As safetensors' save_model leaves it."""
    model = save_model("llama_tied", tmp_path)
    save_shared(model, str(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert torch.equal(weights.embedding, model.get_input_embeddings().weight)
    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()


def test_a_text_decoder_that_was_taken_out_of_a_larger_model_is_the_same_model(tmp_path: Path) -> None:
    """transformers keeps the names that the tensors had in the larger model,
    and keeps experts in one tensor where they were in one."""
    own, taken = tmp_path / "own", tmp_path / "taken"
    save_model("qwen3_5_moe", own)
    save_model("qwen3_5_moe", taken)
    tensors = load_file(taken / "model.safetensors")
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{number}.{part}_proj.weight") for number in range(6)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat((gate, up), dim=1), f"{experts}.down_proj": down}
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(nested, taken / "model.safetensors")
    for got, want in zip(load(taken).layers, load(own).layers, strict=True):
        for ours, theirs in zip(owned(got), owned(want), strict=True):
            assert torch.equal(ours, theirs)
    nested["model.language_model.layers.0.mlp.experts.0.down_proj.weight"] = torch.zeros(48, 40)
    save_file(nested, taken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.language_model\.layers\.0\.mlp\.experts"):
        load(taken)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_model_without_its_head_is_the_same_model(kind: str, tmp_path: Path) -> None:
    """Models for embeddings are saved so, and were refused."""
    save_model(kind, tmp_path)
    config = read_model_config(tmp_path)
    want = checkpoint_table(config, load(tmp_path))
    base = type(make_model(kind).base_model).__name__
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): stored[name] for name in stored}, tmp_path / "model.safetensors")
    edit_config(tmp_path, architectures=[base])
    assert read_model_config(tmp_path) == config
    got = checkpoint_table(config, load(tmp_path))
    assert got.keys() == want.keys()
    for name, view in got.items():
        assert torch.equal(view, want[name]), name


def test_layers_that_predict_further_ahead_are_left_out_of_hybrids_and_refused_elsewhere(
    checkpoint: Path, tmp_path: Path
) -> None:
    hybrid = tmp_path / "hybrid"
    save_model("qwen3_next", hybrid)
    edit_tensors(hybrid, mtp__layers__0__input_layernorm__weight=torch.ones(48))
    load(hybrid)
    edit_tensors(checkpoint, mtp__layers__0__input_layernorm__weight=torch.ones(48))
    with pytest.raises(CheckpointError, match=r"unexpected tensor mtp\.layers\.0"):
        load(checkpoint)


def test_an_untied_checkpoint_needs_its_own_output_matrix(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight missing"):
        load(tmp_path)


def test_a_corrupt_file_is_an_error_that_names_it(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load(checkpoint)


def test_a_missing_shard_is_named_with_what_it_held(tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing: .*says that it holds \S+"):
        load(tmp_path)


@pytest.mark.parametrize("index", [{"metadata": {}}, {"weight_map": {"model.norm.weight": 1}}])
def test_an_index_without_a_map_is_refused(index: dict[str, Any], checkpoint: Path) -> None:
    (checkpoint / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(checkpoint)


def test_a_directory_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load(checkpoint)


def test_dummy_weights_are_complete_and_the_same_for_the_same_seed(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    first, second, other = (dummy_weights(config, torch.float32, seed) for seed in (0, 0, 1))
    for name, view in checkpoint_table(config, first).items():
        assert view.isfinite().all(), name
        torch.testing.assert_close(view, checkpoint_table(config, second)[name], rtol=0, atol=0)
    assert not torch.equal(first.embedding, other.embedding)
