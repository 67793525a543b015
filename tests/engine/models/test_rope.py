"""Owns the comparison of RoPE frequencies with transformers' own, for every supported type and both spellings.
Never tests the rotation itself: the kernels' tests do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.rope import inverse_frequencies, pairs_side_by_side, read_rope, rotation_factors

SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "high_freq_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
]


def transformers_answer(scaling: dict[str, Any], theta: float, seq_len: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_theta": theta} | scaling)
    if scaling["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


def spellings(scaling: dict[str, Any], theta: float) -> list[dict[str, Any]]:
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    return [
        {"rope_parameters": {"rope_theta": theta} | scaling},
        {"rope_theta": theta, "rope_scaling": scaling},
        {"rope_theta": theta, "rope_scaling": older},
    ]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("spelling", [0, 1, 2], ids=["transformers-5", "rope_scaling", "type"])
def test_frequencies_and_attention_factor_equal_those_of_transformers(
    scaling: dict[str, Any], theta: float, spelling: int
) -> None:
    rope = read_rope(spellings(scaling, theta)[spelling], SHAPE["max_position_embeddings"])
    want, factor = transformers_answer(scaling, theta, seq_len=8192)
    torch.testing.assert_close(inverse_frequencies(rope, 64, max_model_len=8192), want, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 40 for i in range(24)],
    "long_factor": [1 + i for i in range(24)],
    "partial_rotary_factor": 0.75,
}


@pytest.mark.parametrize("max_model_len", [1024, 1025])
@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.25}, {"factor": 8.0}])
def test_longrope_is_resolved_once_for_the_longest_length_served(max_model_len: int, extra: dict[str, Any]) -> None:
    config = Phi3Config(
        **SHAPE, rope_parameters={"rope_theta": 1e4} | LONG | extra, original_max_position_embeddings=1024
    )
    want, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=max_model_len)
    fields = {"rope_theta": 1e4, "rope_scaling": LONG | extra, "original_max_position_embeddings": 1024}
    rope = read_rope(fields, SHAPE["max_position_embeddings"], partial=True)
    got = inverse_frequencies(rope, 64, max_model_len)
    torch.testing.assert_close(got[:24], want, rtol=2e-6, atol=0)
    assert not got[24:].any(), "what is not rotated does not turn"
    assert rope.attention_factor == pytest.approx(factor)
    assert rotation_factors(rope, 64).tolist() == [pytest.approx(factor)] * 24 + [1.0] * 8


def test_a_head_that_is_rotated_in_part_has_its_pairs_half_a_head_apart() -> None:
    rope = read_rope({"partial_rotary_factor": 0.5}, 2048, partial=True)
    assert pairs_side_by_side(rope, 8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert pairs_side_by_side(read_rope({}, 2048), 8).tolist() == list(range(8))


def test_no_rope_fields_at_all_mean_the_default_base() -> None:
    rope = read_rope({"rope_theta": None, "rope_scaling": None}, 2048)
    assert rope == read_rope({}, 2048)
    assert (rope.rope_type, rope.theta, rope.factor) == ("default", 10000.0, 1.0)


def test_dynamic_scaling_does_not_depend_on_anything_but_the_served_length() -> None:
    """Chunks and cached prefixes are rotated at different times, and must agree."""
    rope = read_rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096)
    short = inverse_frequencies(rope, 64, max_model_len=100)
    torch.testing.assert_close(short, inverse_frequencies(rope, 64, max_model_len=4096), rtol=0, atol=0)
    torch.testing.assert_close(short, transformers_answer({"rope_type": "dynamic", "factor": 2.0}, 1e4, 1)[0])
    assert not torch.equal(short, inverse_frequencies(rope, 64, max_model_len=8192))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "3d", "factor": 2.0}}, "'3d' is not supported; supported are default"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' needs short_factor, long_factor"),
        ({"rope_parameters": {"rope_type": "su"}}, "'su'"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, r"partial_rotary_factor 0\.25"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope(fields, 4096)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 4096),
        ({"type": "linear", "factor": 4}, 16384),
        ({"type": "dynamic", "factor": 2}, 8192),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": 1024}, 4096),
        (LLAMA3, 4096),
    ],
)
def test_scaling_says_how_far_positions_reach(scaling: dict[str, Any], longest: int) -> None:
    assert read_rope({"rope_scaling": scaling}, 4096).longest_position(4096) == longest
