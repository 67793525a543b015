"""Contracts of config.json's single values: a value of another kind is refused by its name, wherever it is.
Never loads weights, and knows no field's meaning: each is replaced by a value that nobody expects there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest

from engine.models.config import parse_model_config
from tests.engine.models.test_shapes import PARAMETERS, SHAPES
from tests.support.tiny_vision import TEXT, VISION

Document = dict[str, Any]
LLAMA, HYBRID = (json.loads((SHAPES / name / "config.json").read_text()) for name in ("llama-3.1-8b", "qwen3.5-27b"))
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
    "input_activations": {"num_bits": 8},
}
PACKED: list[Document] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"format": "pack-quantized", "config_groups": {"first": GROUP}, "ignore": ["lm_head"]},
]
DOCUMENTS: dict[str, Document] = {
    **{name: json.loads((SHAPES / name / "config.json").read_text()) for name in PARAMETERS},
    **{packing.get("quant_method", "compressed"): LLAMA | {"quantization_config": packing} for packing in PACKED},
    "hybrid within": {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": HYBRID},
    "with images": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": TEXT,
        "vision_config": VISION,
        "image_token_id": 1,
    },
}
UNEXPECTED = (None, "x", "", -1, 0, 1, 1.5, float("nan"), True, [], [1], ["x"], [None], [[]], {}, {"a": 1})


def places(document: Document, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in document.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from places(value, (*above, name))


def changed(document: Document, place: tuple[str, ...], value: Any) -> Document:
    copy = deepcopy(document)
    holder = copy
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = value
    return copy


@pytest.mark.parametrize("name", DOCUMENTS)
def test_whatever_is_in_a_field_is_read_or_refused_as_a_value(name: str) -> None:
    """A start reports a ValueError with the file's name, and anything else by a traceback."""
    document = DOCUMENTS[name]
    parse_model_config(document)
    refused = 0
    for place in places(document):
        for value in UNEXPECTED:
            with suppress(ValueError):
                parse_model_config(changed(document, place, value))
                refused -= 1
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("llama-3.1-8b", "num_key_value_heads", "8", "num_key_value_heads is '8': expected a positive integer"),
        ("llama-3.1-8b", "num_key_value_heads", -8, "num_key_value_heads is -8: expected a positive integer"),
        ("llama-3.1-8b", "head_dim", -128, "head_dim is -128: expected a positive integer"),
        ("llama-3.1-8b", "rms_norm_eps", "x", "rms_norm_eps is 'x': expected a positive number"),
        ("llama-3.1-8b", "rms_norm_eps", float("nan"), "rms_norm_eps is nan: expected a positive number"),
        ("llama-3.1-8b", "rope_theta", [1], r"rope_theta is \[1\]: expected a positive number"),
        ("llama-3.1-8b", "rope_scaling", "x", "rope_scaling is 'x': expected an object"),
        ("llama-3.1-8b", "rope_scaling.factor", "8", "factor is '8': expected a positive number"),
        ("llama-3.1-8b", "architectures", "LlamaForCausalLM", "architectures is 'LlamaForCausalLM': expected a list"),
        ("gemma-3-1b", "query_pre_attn_scalar", 0, "query_pre_attn_scalar is 0: expected a positive number"),
        ("qwen3-30b-a3b", "mlp_only_layers", 3, "mlp_only_layers is 3: expected a list"),
        ("compressed", "quantization_config.ignore", "lm_head", "ignore is 'lm_head': expected a list of modules"),
        ("compressed", "quantization_config.config_groups.first", 1, "first is 1: expected an object"),
        ("compressed", "quantization_config.config_groups.first.weights", "x", "weights is 'x': expected an object"),
        ("hybrid within", "text_config", "x", "text_config is 'x': expected an object"),
        ("with images", "vision_config", [1], r"vision_config is \[1\]: expected an object"),
        ("with images", "text_config.rope_parameters.mrope_section", "x", "mrope_section is 'x': expected a list"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_field_s_name(
    name: str, place: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model_config(changed(DOCUMENTS[name], tuple(place.split(".")), value))
