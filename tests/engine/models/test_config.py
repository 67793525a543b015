"""Owns the reading of config.json: what each architecture leaves unsaid, and what is refused.
Never loads weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import CheckpointError, parse_model_config, read_model_config
from engine.models.registry import FAMILIES
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
    model = make_model(kind)
    model.config.save_pretrained(tmp_path)
    wanted = model.config.get_text_config()
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = [type(model).__name__]
    got = parse_model_config(raw)
    assert got.head_dim == getattr(wanted, "head_dim", wanted.hidden_size // wanted.num_attention_heads)
    assert got.num_kv_heads == wanted.num_key_value_heads
    assert got.tie_word_embeddings == wanted.tie_word_embeddings
    assert got.rms_norm_eps == wanted.rms_norm_eps
    rope = wanted.rope_parameters.get("full_attention", wanted.rope_parameters)
    assert (got.rope.theta, got.rope.rope_type) == (rope["rope_theta"], rope["rope_type"])


QWEN2_FROM_FIRST = {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 0}
QWEN2_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
FP8 = {"quant_method": "fp8"}
_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [None, None]}
IN_BLOCKS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _BLOCKS}},
}
PHI_SCALING = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"]}
QWEN3_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "head_dim": 16}
QWEN3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "head_dim": 16}
QWEN3_5_VL = {"architectures": ["Qwen3_5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"\(bitsandbytes\) is not .* fp8, gptq"),
        ({"is_causal": False}, "is_causal False is not supported; supported is True"),
        (QWEN3_MOE | {"is_causal": False}, "is_causal False"),
        (QWEN3_5_VL | {"text_config": BASE | {"is_causal": False}}, "is_causal False"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 1.0}}}, r"per_layer_config \{'1': .* is not supported"),
        (QWEN3_5_VL | {"text_config": BASE | {"per_layer_config": {"1": {"head_dim": 8}}}}, "per_layer_config"),
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "original_max_position_embeddings is None: expected"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        (MISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types full_attention are not supported"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0: expected a positive integer"),
        (QWEN2_WINDOW | {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "names 1 layers, .* are 2"),
        (QWEN2_WINDOW | {"layer_types": ["sliding_attention"] * 2}, "there is no sliding_window in use"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0 is not supported"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0 is not supported"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3 | {"hidden_activation": "silu"}, "hidden_activation 'silu' .* supported is 'gelu_pytorch_tanh'"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has rope_theta: expected full_attention"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "no_rope_layers has 1 entries, but there are 2 layers"),
        (PHI3 | {"partial_rotary_factor": 0.7}, r"partial_rotary_factor 0\.7 of 16 is 11: expected an even size"),
        (PHI3 | {"rope_scaling": PHI_SCALING | {"long_factor": [1.0]}}, "long_factor has 1 entries: expected 8"),
        (QWEN3_MOE | {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts is 0: expected a positive integer"),
        (QWEN3_NEXT | {"layer_types": ["linear_attention"]}, "layer_types names 1 layers, but there are 2"),
        (QWEN3_NEXT | {"layer_types": ["linear_attention"] * 2}, "layer_types has no full_attention: at least one"),
        (
            QWEN3_NEXT | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types sliding_attention are not",
        ),
        (QWEN3_NEXT | {"full_attention_interval": 1, "linear_num_value_heads": 24}, "heads is 24, and .*heads 16: exp"),
        (QWEN3_NEXT | {"full_attention_interval": 2, "num_experts": 9}, "num_experts_per_tok is 10, but there are 9"),
        (QWEN3_5 | {"full_attention_interval": 2, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (QWEN3_5 | {"full_attention_interval": 0}, "full_attention_interval is 0: expected a positive integer"),
        (QWEN3_5_VL, "text_config is None: expected an object, the text decoder's fields"),
        (QWEN3_5_VL | {"text_config": []}, r"text_config is \[\]: expected an object"),
        (QWEN3_5_VL | {"text_config": BASE | {"hidden_act": "gelu"}}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"hidden_size": None}, "hidden_size is None: expected a positive integer"),
        ({"vocab_size": 10**30}, "vocab_size is 10+: expected a positive integer"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 10+: expected a positive number"),
        (
            QWEN2_WINDOW | {"use_sliding_window": True, "max_window_layers": None},
            "max_window_layers is None: expected a number of layers",
        ),
        (QWEN2_WINDOW | {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers is '1'"),
        *(
            ({"rope_scaling": YARN | {"rope_type": kind, "factor": 1e308}}, r"factor is 1e\+308: expected at most")
            for kind in ("yarn", "linear", "dynamic")
        ),
        (GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 1e-308}}, "factor is 1e-308: expected at least"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, r"'yarn' has no finite frequencies .*beta_fast 1e\+308"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "'yarn' has no finite frequencies with rope_theta 1, factor 2"),
        (
            PHI3 | {"rope_scaling": PHI_SCALING | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings is 1: expected more",
        ),
        (PHI3 | {"partial_rotary_factor": 1e308}, r"partial_rotary_factor is 1e\+308: expected at most 1"),
        (PHI3 | {"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2: expected at most 1"),
        *(
            (
                {"quantization_config": FP8 | {"weight_block_size": size}},
                "weight_block_size is .* two positive integers",
            )
            for size in ([None, 128], ["a", 128], [1.5, 128], [True, 128], [[], 128], [0, 128], {})
        ),
        (
            {"quantization_config": IN_BLOCKS},
            "block_structure is .* two positive integers",
        ),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 attention heads, 4 KV heads"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | fields))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)


def test_an_unknown_architecture_is_refused_with_the_whole_list_of_those_that_are_served() -> None:
    with pytest.raises(ValueError, match=f"MambaForCausalLM is not supported; supported are {', '.join(FAMILIES)}"):
        parse_model_config(BASE | {"architectures": ["MambaForCausalLM"]})


def windows(**fields: Any) -> list[int | None]:
    return [layer.window for layer in parse_model_config(BASE | {"num_hidden_layers": 4} | fields).layers]


def test_each_family_says_which_of_its_layers_see_a_window() -> None:
    assert windows(**QWEN2_WINDOW, use_sliding_window=True) == [None, 64, 64, 64]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(**QWEN2_WINDOW, use_sliding_window=True, layer_types=kinds) == [64, None, 64, None]
    assert windows(**MISTRAL) == [64] * 4
    assert windows(**MISTRAL | {"sliding_window": None}) == [None] * 4
    assert windows(**MISTRAL | {"sliding_window": 128}) == [None] * 4, "as long as any text"
    without = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert windows(**without, max_position_embeddings=8192) == [4096] * 4, "what the first checkpoints meant"
    assert windows(**GEMMA3, sliding_window_pattern=2) == [64, None, 64, None]
    assert windows(**GEMMA3, num_hidden_layers=7) == [64] * 5 + [None, 64]
    assert windows(**SMOLLM3, sliding_window=64) == [None] * 4
    assert windows(**SMOLLM3, sliding_window=64, use_sliding_window=True) == [None, None, None, 64]
    assert windows(**PHI3, sliding_window=64) == [64] * 4
    assert windows(**QWEN3_MOE, sliding_window=64) == [None] * 4
    assert windows(**QWEN3_MOE, sliding_window=64, use_sliding_window=True) == [64] * 4


@pytest.mark.parametrize("family", [QWEN2_FROM_FIRST, QWEN3_MOE], ids=["qwen2", "qwen3_moe"])
def test_a_window_that_is_on_without_a_length_has_that_of_transformers(family: dict[str, Any]) -> None:
    """Regression: all layers saw all tokens."""
    on = {"use_sliding_window": True, "max_position_embeddings": 8192}
    assert windows(**family, **on) == [4096] * 4
    assert windows(**family, **on, sliding_window=None) == [None] * 4


def test_gemma_3_is_read_from_the_fields_of_its_first_checkpoints() -> None:
    """The first checkpoints on the hub have no layer_types, two bases beside each other, and much left out."""
    published = GEMMA3 | {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None}
    config = parse_model_config(BASE | published | {"num_hidden_layers": 6, "query_pre_attn_scalar": 64})
    thetas = [layer.rope.theta for layer in config.layers if layer.rope is not None]
    assert thetas == [1e4] * 5 + [1e6]
    assert (config.head_dim, config.tie_word_embeddings, config.embedding_scale) == (256, True, 8.0)
    assert (config.attention_scale, config.norm_offset, config.activation) == (1 / 8, 1.0, "gelu_tanh")
    assert config.qk_norm
    assert config.post_norms


def test_gemma_3_takes_scaling_and_bases_that_lie_beside_the_newer_fields() -> None:
    """Regression: scaling that somebody adds to a checkpoint that transformers 5 wrote was ignored. transformers reads
    both fields."""
    ropes = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    ropes["full_attention"]["rope_theta"] = 1e5
    beside = {"rope_parameters": ropes, "rope_scaling": YARN, "rope_theta": 1e7, "rope_local_base_freq": 500}
    config = parse_model_config(BASE | GEMMA3 | beside)
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("yarn", 1e5, 2.0)
    nearby = config.layers[0].rope
    assert nearby is not None
    assert (nearby.rope_type, nearby.theta) == ("default", 500.0)


def test_gemma_3_counts_the_positions_that_scaling_reaches() -> None:
    config = parse_model_config(BASE | GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert config.rope.longest_position(config.max_position_embeddings) == 128
    assert config.layers[0].rope != config.rope, "layers that see a window are not scaled"


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_gemma_3_reaches_as_far_as_other_families_with_scaling_that_is_not_linear(scaling: dict[str, Any]) -> None:
    gemma, llama = (parse_model_config(BASE | family | {"rope_scaling": scaling}) for family in (GEMMA3, {}))
    for served in ("default_length", "longest_position"):
        found = [getattr(config.rope, served)(config.max_position_embeddings) for config in (gemma, llama)]
        assert found[0] == found[1] >= 128


def test_smollm3_rotates_in_the_layers_that_it_lists() -> None:
    def rotated(**fields: Any) -> list[bool]:
        return [layer.rope is not None for layer in parse_model_config(BASE | SMOLLM3 | fields).layers]

    assert rotated(num_hidden_layers=5) == [True, True, True, False, True]
    assert rotated(no_rope_layers=[0, 1]) == [False, True]
    assert parse_model_config(BASE | SMOLLM3).rope.theta == 2e6


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi_3_knows_longrope_by_its_older_names(name: str) -> None:
    fields = {"rope_scaling": PHI_SCALING | {"type": name}, "original_max_position_embeddings": 32}
    rope = parse_model_config(BASE | PHI3 | fields).rope
    assert (rope.rope_type, rope.original_max_position, rope.short_factors[1]) == ("longrope", 32, 1.5)
    assert (rope.default_length(128), rope.longest_position(128)) == (32, 128)


def test_experts_are_in_the_layers_that_the_config_names() -> None:
    def layers(**fields: Any) -> list[bool]:
        config = parse_model_config(BASE | QWEN3_MOE | {"num_hidden_layers": 4} | fields)
        return [layer.experts is not None for layer in config.layers]

    assert layers() == [True] * 4
    assert layers(decoder_sparse_step=2) == [False, True, False, True]
    assert layers(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert parse_model_config(BASE).expert_sizes == ()
    assert parse_model_config(BASE | QWEN3_MOE).expert_sizes == (768,)


def test_shares_of_experts_are_normalised_where_the_config_says_so_and_always_in_mixtral() -> None:
    def routing(**fields: Any) -> tuple[int, bool]:
        experts = parse_model_config(BASE | fields).layers[0].experts
        assert experts is not None
        return experts.routing.per_token, experts.routing.renormalize

    assert routing(**QWEN3_MOE) == (8, False)
    assert routing(**QWEN3_MOE, norm_topk_prob=True, num_experts_per_tok=3) == (3, True)
    assert routing(architectures=["MixtralForCausalLM"]) == (2, True)


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


def test_hybrids_have_linear_attention_in_all_but_every_fourth_layer_unless_they_say_which() -> None:
    def attends(**fields: Any) -> list[bool]:
        layers = parse_model_config(BASE | QWEN3_NEXT | {"num_hidden_layers": 8} | fields).layers
        return [layer.linear is None for layer in layers]

    assert attends() == [False, False, False, True] * 2
    assert attends(full_attention_interval=3) == [False, False, True] * 2 + [False] * 2
    assert attends(layer_types=["full_attention", "linear_attention"] * 4) == [True, False] * 4


def test_hybrids_take_their_defaults_from_what_is_left_out() -> None:
    config = parse_model_config(BASE | QWEN3_NEXT | {"num_hidden_layers": 4})
    (linear, *_), experts = config.linear_layers, config.layers[0].experts
    heads = linear.heads
    assert (heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim) == (16, 32, 128, 128)
    assert (linear.kernel, linear.channels, linear.stacked_by_head) == (4, 8192, True)
    assert experts is not None
    assert (experts.count, experts.routing.per_token, experts.routing.renormalize) == (512, 10, True)
    assert (experts.intermediate_size, experts.shared_size) == (512, 512)
    assert (config.attention_gate, config.qk_norm, config.norm_offset, config.rope.rotated) == (True, True, 1.0, 0.25)
    dense = parse_model_config(BASE | QWEN3_5 | {"num_hidden_layers": 4})
    assert [layer.experts for layer in dense.layers] == [None] * 4
    assert not dense.linear_layers[0].stacked_by_head


def test_multimodal_rotation_of_a_text_is_the_plain_one() -> None:
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    fields = BASE | QWEN3_5 | {"num_hidden_layers": 4}
    plain = {"rope_theta": 1e7, "partial_rotary_factor": 0.5}
    assert parse_model_config(fields | {"rope_parameters": sections}) == parse_model_config(
        fields | {"rope_parameters": plain}
    )


def test_memory_and_work_count_the_layers_that_have_keys_and_values() -> None:
    config = parse_model_config(BASE | QWEN3_5 | {"num_hidden_layers": 8})
    assert (config.num_layers, config.num_attention_layers, len(config.linear_layers)) == (8, 2, 6)
    assert parse_model_config(BASE).num_attention_layers == 2


def test_the_text_decoder_of_a_vision_language_model_is_read_and_its_head_is_tied_as_the_whole_says() -> None:
    text = {key: value for key, value in BASE.items() if key != "architectures"}
    decoder = text | {"head_dim": 16, "full_attention_interval": 2, "tie_word_embeddings": True}
    alone = parse_model_config(decoder | {"architectures": ["Qwen3_5ForCausalLM"]})
    for tied in (False, True):
        whole = QWEN3_5_VL | {"text_config": decoder, "tie_word_embeddings": tied, "hidden_size": 7}
        got = parse_model_config(whole | {"vision_config": {"depth": 2}})
        assert got == replace(alone, architecture="Qwen3_5ForConditionalGeneration", tie_word_embeddings=tied)
        assert got.vision is None
