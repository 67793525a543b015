"""Contracts of the family that takes images: what its config.json may say, in both of its forms, and how it starts.
Never computes an answer: tests/golden/test_vision.py does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.models.config import CheckpointError, parse_model_config, pixels_of, read_model_config
from engine.models.encoding import EncodingModel
from engine.models.native_encoding import NativeEncodingModel
from engine.models.parameters import allocate, checkpoint_table
from engine.models.vision_config import PixelConfig, read_pixels
from engine.models.vision_weights import allocate_vision, vision_table
from engine.models.weights import load_weights
from engine.multimodal_inputs import SpanInput
from tests.support.compiler import needs_compiler
from tests.support.memory_maps import mapping_flags, needs_huge_pages
from tests.support.tiny_models import edit_config, save_model
from tests.support.tiny_vision import IMAGE, save_vision_model

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
"""The config.json of Qwen2.5-VL-3B-Instruct."""
META = torch.device("meta")


def test_the_published_form_is_read_and_has_as_many_parameters_as_the_model() -> None:
    config = parse_model_config(PUBLISHED)
    assert config.vision is not None
    assert (config.vision.position_sections, config.vision.side, config.qkv_bias) == ((16, 24, 24), 28, True)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 1e6)
    weights = allocate(config, torch.bfloat16, META)
    tables = (checkpoint_table(config, weights), vision_table(allocate_vision(config.vision, torch.bfloat16, META)))
    assert all(view.is_meta for table in tables for view in table.values()), "memory was taken to count parameters"
    assert sum(view.numel() for table in tables for view in table.values()) == 3_754_622_976


@needs_huge_pages
def test_an_encoder_s_matrices_lie_on_large_pages() -> None:
    vision = parse_model_config(PUBLISHED).vision
    assert vision is not None
    small = replace(vision, hidden_size=64, intermediate_size=128, depth=2, full_attention=(1,))
    matrices = [tensor for tensor in vision_table(allocate_vision(small, torch.bfloat16)).values() if tensor.dim() == 2]
    assert len(matrices) == 2 * 5 + 2
    for matrix in matrices:
        assert "hg" in (mapping_flags(matrix.data_ptr()) or [])


def test_the_form_that_transformers_writes_says_the_same() -> None:
    text = {key: value for key, value in PUBLISHED.items() if key not in ("architectures", "vision_config")}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {key: value for key, value in text.items() if key not in ("rope_scaling", "rope_theta", "image_token_id")}
    nested = {
        "architectures": PUBLISHED["architectures"],
        "image_token_id": 151655,
        "text_config": text | {"rope_parameters": rope},
        "vision_config": PUBLISHED["vision_config"],
    }
    assert parse_model_config(nested) == parse_model_config(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}, "mrope_section"),
        ({"vision_config": PUBLISHED["vision_config"] | {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        ({"vision_config": PUBLISHED["vision_config"] | {"in_chans": 4}}, "in_channels 4"),
        ({"vision_config": PUBLISHED["vision_config"] | {"window_size": 100}}, "windows of 100"),
        ({"vision_config": PUBLISHED["vision_config"] | {"out_hidden_size": 1024}}, "out_hidden_size 1024"),
        ({"vision_config": PUBLISHED["vision_config"] | {"num_heads": 3}}, "3 heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_model_config(PUBLISHED | changes)


def test_what_the_processor_says_is_kept_or_refused_by_name() -> None:
    vision = parse_model_config(PUBLISHED).vision
    assert vision is not None
    assert read_pixels({}, vision) == PixelConfig()
    sizes = {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "image_mean": [0, 0, 0], "patch_size": 14}
    found = read_pixels(sizes, vision)
    assert (found.min_pixels, found.max_pixels, found.mean) == (3136, 12845056, (0, 0, 0))
    for name, value in (("patch_size", 16), ("merge_size", 1), ("do_normalize", False), ("resample", 2)):
        with pytest.raises(ValueError, match=f"{name} {value}"):
            read_pixels({name: value}, vision)


def test_a_processor_that_is_not_computed_is_refused_with_its_file(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": false}')
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json: do_resize False is not supported"):
        create_executor(tmp_path, settings())
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="an image has at least 3136 pixels"):
        create_executor(tmp_path, settings(num_kv_blocks=2))


def test_images_are_prepared_as_the_processors_file_of_transformers_5_says(tmp_path: Path) -> None:
    """transformers 5 writes no other file. It was not read, and such checkpoints saw images of other sizes and
    colours than those that they were trained with."""
    vision = parse_model_config(PUBLISHED).vision
    assert vision is not None
    means = {"image_mean": [0.5, 0.5, 0.5], "size": {"shortest_edge": 3136, "longest_edge": 200704}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": means}))
    found = pixels_of(tmp_path, vision)
    assert (found.mean, found.min_pixels, found.max_pixels) == ((0.5, 0.5, 0.5), 3136, 200704)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "max_pixels": 4000}')
    assert pixels_of(tmp_path, vision) == found
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    found = pixels_of(tmp_path, vision)
    assert (found.mean, found.max_pixels) == ((0, 0, 0), 4000), "before transformers 5, the other file had them"
    for nested, told in (
        ({"do_resize": False}, "do_resize False is not supported"),
        (["a"], r"image_processor is \['a'"),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
        with pytest.raises(CheckpointError, match=rf"/processor_config\.json: {told}"):
            pixels_of(tmp_path, vision)


def test_a_start_says_that_nothing_describes_how_images_are_prepared(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    dummy = settings(load_format="dummy", max_num_batched_tokens=2048, num_kv_blocks=2048)
    assert "images" not in create_executor(tmp_path, dummy)[1].reasons
    (tmp_path / "preprocessor_config.json").unlink()
    assert "describes no image processor" in create_executor(tmp_path, dummy)[1].reasons["images"]


# --- starts ---------------------------------------------------------------------------------------------------------


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "num_kv_blocks": 64, "num_threads": 1, **changes})


def test_a_tensor_of_the_encoder_that_is_missing_or_left_over_is_named(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for depth, told in ((4, r"visual.blocks.3.*missing"), (2, r"unexpected tensor visual.blocks.2")):
        edit_config(tmp_path, vision_config=config["vision_config"] | {"depth": depth})
        with pytest.raises(CheckpointError, match=told):
            create_executor(tmp_path, settings())
    edit_config(tmp_path, vision_config=config["vision_config"])
    with pytest.raises(CheckpointError, match=r"unexpected tensor visual"):
        load_weights(tmp_path, parse_model_config(config), torch.float32)


def test_the_names_that_the_modules_have_in_transformers_say_the_same(tmp_path: Path) -> None:
    """Fine-tunes that other programs saved were refused."""
    published, other = tmp_path / "published", tmp_path / "other"
    published.mkdir()
    save_vision_model(published)
    shutil.copytree(published, other)

    def renamed(name: str) -> str:
        if name.startswith("model."):
            return name.replace("model.", "model.language_model.", 1)
        return name.replace("visual.", "model.visual.", 1)

    stored = load_file(published / "model.safetensors")
    save_file({renamed(name): tensor for name, tensor in stored.items()}, other / "model.safetensors")
    config = read_model_config(published)
    assert config.vision is not None
    loaded = []
    for directory in (published, other):
        others = vision_table(allocate_vision(config.vision, torch.float32))
        weights = load_weights(directory, config, torch.float32, others=others)
        loaded.append(checkpoint_table(config, weights) | others)
    assert loaded[0].keys() == loaded[1].keys()
    for name, tensor in loaded[0].items():
        assert torch.equal(tensor, loaded[1][name]), name


def test_random_weights_are_those_of_the_encoder_too(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, resolved = create_executor(tmp_path, settings(load_format="dummy"))
    second, _ = create_executor(tmp_path, settings(load_format="dummy"))
    grid = (1, 2, 3)
    given = SpanInput.of("image", 0, grid, bytes(range(256))[:192] * 6)
    embeddings = []
    for executor in (first, second):
        assert isinstance(executor.model, EncodingModel | NativeEncodingModel)
        embeddings.append(
            executor.model.contents.encoder.encode(grid, given.data[: resolved.inputs[0].num_bytes(grid)])
        )
    assert torch.equal(*embeddings)
    assert embeddings[0].isfinite().all()
    assert embeddings[0].std() > 1e-3


def test_the_largest_image_is_what_a_step_a_request_and_the_cache_take(tmp_path: Path) -> None:
    save_vision_model(tmp_path)

    def largest(**changes: Any) -> tuple[int, str]:
        resolved = create_executor(tmp_path, settings(**changes))[1]
        (kind,) = resolved.inputs
        assert (kind.name, kind.token_id, kind.side, kind.chunkable) == ("image", IMAGE, 8, False)
        return kind.max_tokens, resolved.reasons["largest image"]

    assert largest() == (64, "as the checkpoint says; larger ones are scaled down")
    small = {"max_num_seqs": 4, "num_speculative_tokens": 0, "max_num_batched_tokens": 50}
    assert largest(**small)[0] == 46
    assert largest(**small, max_prefill_tokens=20)[0] == 20
    extends = SchedulerConfig(atomic_policy="extend")
    assert largest(**small, max_prefill_tokens=20, scheduler=extends)[0] == 46
    assert largest(num_kv_blocks=2) == (
        32,
        "32 tokens, limited by max_model_len and num_kv_blocks (a request must hold the image); larger ones are scaled "
        "down",
    )
    found = largest(encoder_cache_memory_gib=30 * 96 * 4 / 2**30)
    assert found == (
        30,
        "30 tokens, limited by encoder_cache_memory_gib (it must hold the encoded image); larger ones are scaled down",
    )
    with pytest.raises(ConfigError, match="Images are limited to 3 tokens by encoder_cache_memory_gib "):
        largest(encoder_cache_memory_gib=3 * 96 * 4 / 2**30)


@needs_compiler
def test_the_native_kernels_are_chosen_unless_heads_do_not_fit_them(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    executor, resolved = create_executor(tmp_path, settings(batch_invariant=True))
    assert resolved.kernels == "native"
    assert isinstance(executor.model, NativeEncodingModel)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_attention_heads": 12, "num_key_value_heads": 4}
    text["rope_parameters"]["mrope_section"] = [1, 1, 2]
    edit_config(tmp_path, text_config=text)
    executor, resolved = create_executor(tmp_path, settings(load_format="dummy"))
    assert "not native: head_dim is 8" in resolved.reasons["kernels"]
    assert isinstance(executor.model, EncodingModel)


@pytest.mark.parametrize("changes", [{"max_encoder_tokens": 5}, {"encoder_cache_memory_gib": 1.0}])
def test_a_model_without_an_encoder_refuses_its_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is .* LlamaForCausalLM takes text alone"):
        create_executor(tmp_path, settings(**changes))


def test_settings_of_the_encoder_reach_the_engine(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    resolved = create_executor(tmp_path, settings(max_encoder_tokens=77, encoder_cache_memory_gib=0.5))[1]
    assert (resolved.max_encoder_tokens, resolved.encoder_cache_tokens) == (77, 2**29 // (96 * 4))
