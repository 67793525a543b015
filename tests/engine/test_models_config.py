"""Owns the reading of config.json: what each architecture leaves unsaid, and what is refused.
Never loads weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import CheckpointError, parse_model_config, read_model_config
from tests.support.tiny_models import KINDS, make_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def test_llama_takes_its_defaults_from_what_is_left_out() -> None:
    config = parse_model_config(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    switches = (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings)
    assert not any(switches)


def test_each_family_has_its_own_biases_norms_and_head_size() -> None:
    def read(name: str, **fields: Any) -> tuple[bool, bool, bool, bool, int]:
        config = parse_model_config(BASE | {"architectures": [name]} | fields)
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.head_dim

    assert read("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False, 16)
    assert read("Qwen2ForCausalLM") == (True, False, False, False, 16)
    assert read("Qwen3ForCausalLM") == (False, False, False, True, 128)
    assert read("Qwen3ForCausalLM", attention_bias=True, head_dim=32) == (True, True, False, True, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_transformers_wrote_is_read_as_it_was_meant(kind: str, tmp_path: Path) -> None:
    wanted = make_model(kind).config
    wanted.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = [type(make_model(kind)).__name__]
    got = parse_model_config(raw)
    assert got.head_dim == getattr(wanted, "head_dim", wanted.hidden_size // wanted.num_attention_heads)
    assert got.num_kv_heads == wanted.num_key_value_heads
    assert got.tie_word_embeddings == wanted.tie_word_embeddings
    assert got.rms_norm_eps == wanted.rms_norm_eps
    assert got.rope.theta == wanted.rope_parameters["rope_theta"]
    assert got.rope.rope_type == wanted.rope_parameters["rope_type"]


QWEN2_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        (QWEN2_WINDOW | {"use_sliding_window": True}, "sliding_window 64"),
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"hidden_size": None}, "hidden_size is None: expected a positive integer"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 attention heads, 4 KV heads"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | fields))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        QWEN2_WINDOW | {"use_sliding_window": False},
        QWEN2_WINDOW,
        QWEN2_WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 2},
    ],
)
def test_a_sliding_window_that_is_not_in_use_is_no_reason_to_refuse(fields: dict[str, Any]) -> None:
    parse_model_config(BASE | fields)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "holds a list")])
def test_a_broken_config_is_an_error_that_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_model_config(tmp_path)


def test_a_missing_config_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
