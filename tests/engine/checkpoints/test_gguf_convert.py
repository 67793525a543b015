"""Owns the contract of GGUF conversion: same model, same logits, and a named refusal of everything else.
Never compares with the code's own inverse: weights start in Hugging Face's order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints import gguf_convert
from engine.checkpoints.gguf_convert import convert_gguf, to_bfloat16
from engine.checkpoints.model_cache import ModelError
from tests.support.tiny_gguf import MIXTURES, SHAPE, TOKENS, gguf_tensors, hf_weights, write_gguf

WEIGHTS = "model.safetensors"
LINEAR: dict[str, Any] = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
YARN = LINEAR | {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__original_context_length": 128}


def convert(path: Path) -> Path:
    directory = path.with_suffix(".prepared")
    directory.mkdir()
    convert_gguf(path, directory, progress=False)
    return directory


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((convert(path) / "config.json").read_text())


def hf_config(arch: str, tied: bool) -> Any:
    from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    kinds = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "qwen3moe": Qwen3MoeConfig,
        "mixtral": MixtralConfig,
    }
    per_token = {"num_experts_per_tok": SHAPE["per_token"]}
    mixtures: dict[str, dict[str, Any]] = {
        "qwen3moe": {
            "num_experts": SHAPE["experts"], "moe_intermediate_size": SHAPE["expert"], "norm_topk_prob": True
        },
        "mixtral": {"num_local_experts": SHAPE["experts"]},
    }  # fmt: skip
    return kinds[arch](
        **(mixtures[arch] | per_token if arch in mixtures else {}),
        vocab_size=SHAPE["vocab"],
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["inner"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        head_dim=SHAPE["head_dim"],
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_converted_model_gives_the_logits_of_the_model_that_the_gguf_was_written_from(
    arch: str, tied: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    weights = hf_weights(arch, tied=tied)
    original = AutoModelForCausalLM.from_config(hf_config(arch, tied), dtype=torch.float32).eval()
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    missing, unexpected = original.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])

    directory = convert(write_gguf(tmp_path / "tiny.gguf", arch, gguf_tensors(arch, weights)))
    converted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    token_ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(token_ids).logits, original(token_ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("arch", MIXTURES)
def test_a_converted_mixture_gives_the_logits_of_the_model_that_the_gguf_was_written_from(
    arch: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    weights = hf_weights(arch, tied=False)
    hf_config(arch, tied=False).save_pretrained(tmp_path / "original")
    save_file({name: torch.from_numpy(values) for name, values in weights.items()}, tmp_path / "original" / WEIGHTS)
    directory = convert(write_gguf(tmp_path / "tiny.gguf", arch, gguf_tensors(arch, weights)))
    token_ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        original, converted = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()(token_ids).logits
            for each in (tmp_path / "original", directory)
        )
    torch.testing.assert_close(converted, original, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arch", "changes", "why"),
    [
        ("qwen3moe", {"qwen3moe__expert_used_count": 6}, r"expert_used_count is 6; expected 1 to .*expert_count, 5"),
        ("qwen3moe", {"qwen3moe__expert_feed_forward_length": None}, r"expert_feed_forward_length is missing"),
        ("mixtral", {"llama__expert_used_count": None}, r"llama\.expert_used_count is missing"),
        ("mixtral", {"llama__expert_count": 4}, r"ffn_gate_inp\.weight has shape \[5, 32\]; expected \[4, 32\]"),
        ("qwen3", {"qwen3__expert_count": 4, "qwen3__expert_used_count": 2}, "expected no experts in 'qwen3'"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused_by_name(
    arch: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        convert(write_gguf(tmp_path / "tiny.gguf", arch, **changes))


def test_experts_in_tensors_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    """The first files of Mixtral had them; llama.cpp reads them no more."""
    tensors = gguf_tensors("mixtral", hf_weights("mixtral"))
    for name in [name for name in tensors if name.endswith("_exps.weight")]:
        for number, values in enumerate(tensors.pop(name)):
            tensors[name.replace("_exps", f".{number}")] = values
    with pytest.raises(
        ModelError, match=r"tensor blk\.0\.ffn_gate_exps\.weight is missing; expected shape \[5, 64, 32\]"
    ):
        convert(write_gguf(tmp_path / "tiny.gguf", "mixtral", tensors))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", *MIXTURES])
def test_every_weight_comes_back_in_hugging_faces_order(arch: str, tmp_path: Path) -> None:
    weights = hf_weights(arch)
    loaded = load_file(convert(write_gguf(tmp_path / "tiny.gguf", arch)) / WEIGHTS)
    assert sorted(loaded) == sorted(weights)
    for name, values in weights.items():
        assert loaded[name].dtype == torch.bfloat16
        assert np.array_equal(loaded[name].float().numpy(), values), name


def test_quantised_rows_are_reordered_as_their_values_are(tmp_path: Path) -> None:
    weights = hf_weights("llama")
    kinds = {
        "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.1.attn_k.weight": gguf.GGMLQuantizationType.Q4_1,
    }
    loaded = load_file(convert(write_gguf(tmp_path / "tiny.gguf", quantized=kinds)) / "model.safetensors")
    for name, kind in (
        ("0.self_attn.q_proj", kinds["blk.0.attn_q.weight"]),
        ("1.self_attn.k_proj", kinds["blk.1.attn_k.weight"]),
    ):
        values = weights[f"model.layers.{name}.weight"]
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert not np.array_equal(expected, values)
        assert torch.equal(loaded[f"model.layers.{name}.weight"], torch.from_numpy(expected).bfloat16())


def test_converting_a_few_rows_at_a_time_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(write_gguf(tmp_path / "whole.gguf")) / "model.safetensors"
    monkeypatch.setattr(gguf_convert, "_VALUES_PER_CHUNK", 5 * SHAPE["hidden"])  # 5 divides none of the row counts
    chunked = convert(write_gguf(tmp_path / "chunked.gguf")) / "model.safetensors"
    assert chunked.read_bytes() == whole.read_bytes()


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even() -> None:
    ties = (np.arange(1000, dtype=np.uint32) << 16 | 0x8000 | 0x3F800000).view(np.float32)
    values = np.concatenate([ties, -ties, np.random.default_rng(0).normal(size=10_000).astype(np.float32), [0.0, -0.0]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(values), expected)


def test_the_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "tiny.gguf"))
    assert config["rms_norm_eps"] == 1e-5  # and not float32's 9.999999747378752e-06
    assert config["rope_theta"] == 50000.0
    assert config["rope_scaling"] is None
    assert config["head_dim"] == SHAPE["head_dim"]
    assert config["max_position_embeddings"] == 512
    assert config["vocab_size"] == len(TOKENS)
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_a_model_with_several_end_tokens_stops_at_each_of_them(tmp_path: Path) -> None:
    directory = convert(write_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=0))
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == 2


def test_how_answers_are_sampled_is_taken_along(tmp_path: Path) -> None:
    told = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05}
    given = {f"general__sampling__{key}": value for key, value in told.items()}
    found = json.loads((convert(write_gguf(tmp_path / "tiny.gguf", **given)) / "generation_config.json").read_text())
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    assert {name: found[name] for name in sampling} == sampling


def test_the_head_size_defaults_to_the_hidden_size_over_the_heads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama__attention__key_length=None, llama__attention__value_length=None)
    assert config_of(path)["head_dim"] == SHAPE["hidden"] // SHAPE["heads"]


def test_the_context_is_no_longer_than_a_sliding_window(tmp_path: Path) -> None:
    assert (
        config_of(write_gguf(tmp_path / "t.gguf", llama__attention__sliding_window=64))["max_position_embeddings"] == 64
    )


def test_linear_and_yarn_scaling_are_carried_over(tmp_path: Path) -> None:
    assert config_of(write_gguf(tmp_path / "l.gguf", **LINEAR))["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    assert config_of(write_gguf(tmp_path / "y.gguf", **YARN))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


@pytest.mark.parametrize("name", ["scaling__factor", "scale_linear"])
def test_a_factor_without_a_type_is_linear_scaling(name: str, tmp_path: Path) -> None:
    """Regression: it was ignored. llama.cpp reads it so, also by the name that its first files had."""
    path = write_gguf(tmp_path / "t.gguf", **{f"llama__rope__{name}": 4.0})
    assert config_of(path)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_yarn_has_the_file_s_limits(tmp_path: Path) -> None:
    """Regression: they were ignored. transformers follows them in the model that was converted; llama.cpp does not."""
    limits = {"llama__rope__scaling__yarn_beta_fast": 16.0, "llama__rope__scaling__yarn_beta_slow": 2.0}
    found = config_of(write_gguf(tmp_path / "t.gguf", **YARN, **limits))["rope_scaling"]
    assert (found["beta_fast"], found["beta_slow"]) == (16.0, 2.0)


@pytest.mark.parametrize("name", ["attn_factor", "ext_factor", "log_multiplier"])
def test_what_llama_cpp_does_not_read_of_yarn_is_ignored(name: str, tmp_path: Path) -> None:
    """Regression: it was refused. The converter writes `yarn_attn_factor` for each model that has the field."""
    path = write_gguf(tmp_path / "t.gguf", **YARN, **{f"llama__rope__scaling__yarn_{name}": 0.5})
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert config_of(path)["rope_scaling"] == scaling


def with_rope_factors(factors: np.ndarray) -> dict[str, np.ndarray]:
    return gguf_tensors("llama", hf_weights("llama")) | {"rope_freqs.weight": factors.astype(np.float32)}


def test_llama3_scaling_is_recovered_from_the_divisors_in_the_file(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters={**scaling, "rope_theta": 500000.0}
    )
    scaled = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")[0].double().numpy()
    divisors = 500000.0 ** -(np.arange(0, 128, 2) / 128) / scaled
    assert ((divisors > 1.01) & (divisors < 31)).sum() >= 3  # the ramp between the two ends is used
    path = write_gguf(tmp_path / "t.gguf", tensors=with_rope_factors(divisors), llama__rope__freq_base=500000.0)
    from engine.checkpoints.gguf_config import build_config
    from engine.checkpoints.gguf_file import GGUFFile

    found = build_config(GGUFFile(path))["rope_scaling"]
    assert found.pop("factor") == pytest.approx(32.0, rel=1e-6)
    assert found == {key: value for key, value in scaling.items() if key != "factor"}


def test_divisors_of_one_mean_plain_rope(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", tensors=with_rope_factors(np.ones(SHAPE["head_dim"] // 2)))
    assert config_of(path)["rope_scaling"] is None


@pytest.mark.parametrize("scaling", [LINEAR, YARN], ids=["linear", "yarn"])
def test_divisors_of_one_leave_the_metadata_s_scaling(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Regression: it was dropped. llama.cpp applies divisors and factor together."""
    tensors = with_rope_factors(np.ones(SHAPE["head_dim"] // 2))
    found = config_of(write_gguf(tmp_path / "t.gguf", tensors=tensors, **scaling))["rope_scaling"]
    assert (found["rope_type"], found["factor"]) == (scaling["llama__rope__scaling__type"], 4.0)


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [(LINEAR, "linear"), (YARN, "yarn"), ({"llama__rope__scale_linear": 4.0}, "linear")],
    ids=["linear", "yarn", "scale_linear"],
)
def test_a_factor_beside_divisors_is_refused(scaling: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """Regression: it was dropped."""
    path = write_gguf(tmp_path / "t.gguf", tensors=with_rope_factors(np.full(SHAPE["head_dim"] // 2, 8.0)), **scaling)
    message = rf"rope\.scaling is '{kind}' with factor 4 beside tensor rope_freqs\.weight; expected none, or factor 1\."
    with pytest.raises(ModelError, match=message):
        convert(path)


@pytest.mark.parametrize("divisors", [[1.0, 7.0, 2.0, 5.0], [1.0, 1.0, 0.5, 0.5]])
def test_other_divisors_are_refused(divisors: list[float], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", tensors=with_rope_factors(np.array(divisors)))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not llama3 scaling"):
        convert(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": None}, r"llama\.block_count is missing; expected int"),
        ({"llama__block_count": "two"}, r"llama\.block_count is of type str; expected int"),
        ({"llama__attention__head_count": [4, 4]}, r"head_count is of type list; expected int"),
        ({"llama__attention__head_count": 0}, r"head_count is 0; expected at least 1"),
        ({"llama__attention__causal": False}, r"llama\.attention\.causal is False; expected True"),
        ({"llama__rope__dimension_count": 4}, r"rope\.dimension_count is 4; expected the head size, 8"),
        ({"llama__rope__scaling__attn_factor": 1.2}, r"rope\.scaling\.attn_factor is 1\.2; expected 1\."),
        ({"llama__rope__scaling__type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
        ({"llama__block_count": 3}, r"tensor blk\.2\.attn_norm\.weight is missing; expected shape \[32\]"),
        ({"llama__block_count": 4_000_000_000}, r"tensor blk\.2\.attn_norm\.weight is missing"),
        ({"llama__block_count": 1}, r"tensor blk\.1\.\S+ and 8 more have no place in a LlamaForCausalLM of 1 layers"),
        ({"llama__feed_forward_length": 48}, r"ffn_gate\.weight has shape \[64, 32\]; expected \[48, 32\]"),
        ({"tokenizer__ggml__eos_token_id": 9999}, r"eos_token_id is 9999, but the vocabulary has 266 tokens"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ModelError, match=message) as raised:
        convert(path)
    assert str(path) in str(raised.value)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mamba' is not supported; expected llama, qwen2, qwen3"):
        convert(write_gguf(tmp_path / "tiny.gguf", "mamba", {}))


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = gguf_tensors("llama", hf_weights("llama"))
    del tensors[name]
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        convert(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))


def test_a_tensor_with_values_that_are_not_finite_is_named(tmp_path: Path) -> None:
    tensors = gguf_tensors("llama", hf_weights("llama"))
    tensors["blk.1.ffn_up.weight"] = np.full_like(tensors["blk.1.ffn_up.weight"], np.nan)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_up\.weight holds values that are not finite"):
        convert(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.001, 0.01, 0.05, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused_by_name(share: float, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf \(\d+ bytes\) cannot be read"):
        convert(path)


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<html>" + b"x" * 4096)
    with pytest.raises(ModelError, match=r"page\.gguf \(4102 bytes\) cannot be read: .* GGUF magic invalid"):
        convert(path)


def test_a_damaged_array_length_is_refused_and_not_looped_over(tmp_path: Path) -> None:
    # Every uint64 in the header that equals the vocabulary's size is an array length;
    # each must be noticed when it is huge.
    data = bytearray(write_gguf(tmp_path / "whole.gguf").read_bytes())
    size = len(TOKENS).to_bytes(8, "little")
    at = data.find(size, data.find(b"tokenizer.ggml.token_type"))
    data[at : at + 8] = (1 << 60).to_bytes(8, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"damaged\.gguf .* cannot be read"):
        convert(path)
