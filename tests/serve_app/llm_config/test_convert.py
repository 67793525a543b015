"""An LLMConfig becomes settings that are accepted, and nothing of it gets lost. Long: a case for each argument.
Never reads a file, and needs neither Ray nor vLLM."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.front.command.base_config import base_config
from serve_app.llm_config.convert import FIELDS, convert, convert_engine
from serve_app.llm_config.engine import _READERS, _TOGETHER
from serve_app.llm_config.engine_rules import UNTAKEN
from serve_app.llm_config.taking import Kind, Taking
from serve_app.settings.application import AppSettings
from tests.test_architecture import run_python

LOADING = {"model_loading_config": {"model_id": "m", "model_source": "org/m"}}
CPU = {"accelerator_config": {"kind": "cpu"}}


def base(on_gpu: bool) -> dict[str, Any]:
    args: dict[str, Any] = base_config("", on_gpu=on_gpu)["applications"][0]["args"]
    return args


def converted(**fields: Any) -> Taking:
    taking = convert({**LOADING, **fields}, base)
    AppSettings.model_validate(taking.args)
    return taking


def with_kwargs(*, gpu: bool = False, **kwargs: Any) -> Taking:
    return converted(engine_kwargs=kwargs, **({} if gpu else CPU))


def lines(taking: Taking) -> list[str]:
    return [str(note) for note in taking.notes]


# --- engine_kwargs ----------------------------------------------------------------------------------------------------

TAKEN: list[tuple[dict[str, Any], str, Any]] = [
    ({"max_model_len": 4096}, "engine.max_model_len", 4096),
    ({"max_model_len": "4k"}, "engine.max_model_len", 4000),
    ({"max_model_len": "4K"}, "engine.max_model_len", 4096),
    ({"max_num_seqs": 8}, "engine.max_num_seqs", 8),
    ({"max_num_batched_tokens": 1024}, "engine.max_num_batched_tokens", 1024),
    ({"block_size": 32}, "engine.block_size", 32),
    ({"enable_prefix_caching": False}, "engine.enable_prefix_caching", False),
    ({"num_gpu_blocks_override": 99}, "engine.num_kv_blocks", 99),
    ({"kv_cache_memory_bytes": 2**31}, "engine.kv_cache_memory_gib", 2.0),
    ({"dtype": "float"}, "engine.dtype", "float32"),
    ({"kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype", "fp8_e4m3"),
    ({"load_format": "dummy"}, "engine.load_format", "dummy"),
    ({"tool_call_parser": "hermes", "enable_auto_tool_choice": True}, "tool_parser", "hermes"),
    ({"reasoning_parser": "qwen3"}, "reasoning_parser", "qwen3"),
    ({"limit_mm_per_prompt": {"image": 2}}, "images.max_per_request", 2),
    ({"allowed_media_domains": ["pics.example"]}, "images.allowed_hosts", ["pics.example"]),
    ({"pooler_config": {"pooling_type": "MEAN"}}, "pooling", "mean"),
    ({"enable_lora": True}, "engine.max_loras", 1),
    ({"enable_lora": True, "max_loras": 4, "max_lora_rank": 32}, "engine.max_lora_rank", 32),
    ({"enable_lora": True, "lora_modules": ["law=/a/law"]}, "lora_adapters", {"law": "/a/law"}),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}}, "engine.speculative.max_match", 3),
    ({"speculative_config": {"model": "org/small"}}, "engine.speculative.method", "draft_model"),
    ({"kv_offloading_size": 4, "kv_offloading_backend": "native"}, "engine.kv_tiers.host_memory_gib", 4),
    ({"long_prefill_token_threshold": 64}, "engine.scheduler.long_prefill_token_threshold", 64),
    ({"chunkserve": {"engine": {"targets": {"tpot_ms": 50}}}}, "engine.targets.tpot_ms", 50),
]
ON_GPU: list[tuple[dict[str, Any], str, Any]] = [
    ({"gpu_memory_utilization": 0.5}, "engine.gpu_memory_utilization", 0.5),
    ({"enforce_eager": True}, "engine.cuda_graphs", "none"),
    ({"dtype": "half"}, "engine.dtype", "float16"),
]


@pytest.mark.parametrize(("kwargs", "setting", "value"), TAKEN, ids=str)
def test_an_argument_with_a_counterpart_is_that_setting(kwargs: dict[str, Any], setting: str, value: Any) -> None:
    taking = with_kwargs(**kwargs)
    assert taking.get(setting) == value
    assert lines(taking) == []


@pytest.mark.parametrize(("kwargs", "setting", "value"), ON_GPU, ids=str)
def test_an_argument_of_a_gpu_is_taken_along_for_one(kwargs: dict[str, Any], setting: str, value: Any) -> None:
    taking = with_kwargs(gpu=True, **kwargs)
    assert taking.get(setting) == value
    assert lines(taking) == []


NOTED: list[tuple[dict[str, Any], Kind, str]] = [
    ({"pipeline_parallel_size": 2}, Kind.NOT_SUPPORTED, "here tensor_parallel_size alone divides a model"),
    ({"enable_expert_parallel": True}, Kind.NOT_SUPPORTED, "set chunkserve.engine.expert_parallel_size"),
    ({"tensor_parallel_size": 0}, Kind.NOT_SUPPORTED, "tensor_parallel_size: not a value that vLLM takes here"),
    ({"hf_overrides": {"a": 1}}, Kind.NOT_SUPPORTED, "hf_overrides: chunkserve reads it from the model's directory"),
    ({"chat_template": "/t.jinja"}, Kind.NOT_SUPPORTED, "put it there as chat_template.jinja (given: /t.jinja)"),
    ({"quantization": "bitsandbytes"}, Kind.NOT_SUPPORTED, "quantization: expected one of awq"),
    ({"quantization": "awq"}, Kind.LEFT_OUT, "a packed checkpoint is recognised by its own config"),
    ({"quantization": "fp8"}, Kind.LEFT_OUT, "set engine.quantize int8"),
    ({"tool_call_parser": "granite"}, Kind.NOT_SUPPORTED, "tool_call_parser: expected one of auto, none, hermes"),
    ({"override_generation_config": {"max_new_tokens": 9}}, Kind.NOT_SUPPORTED, "it has no default here"),
    ({"override_generation_config": {"source": "openai"}}, Kind.NOT_SUPPORTED, "it has no default here"),
    ({"generation_config": "/other"}, Kind.CHANGED, "taken as auto, which reads the model's own file"),
    ({"kv_transfer_config": {"kv_connector": "Nixl"}}, Kind.NOT_SUPPORTED, "kv_transfer_config: an engine's KV cache"),
    (
        {"kv_offloading_size": 4, "tensor_parallel_size": 2},
        Kind.LEFT_OUT,
        "kv_offloading_size: lower tiers move the KV of one rank alone (given: 4)",
    ),
    ({"swap_space": 4}, Kind.LEFT_OUT, "for KV, set engine.kv_tiers (given: 4)"),
    ({"kv_offloading_backend": "lmcache"}, Kind.LEFT_OUT, "chunkserve has its own (given: lmcache)"),
    ({"max_model_len": -1}, Kind.CHANGED, "what the checkpoint was trained for (given: -1)"),
    ({"max_num_batched_tokens": "many"}, Kind.NOT_SUPPORTED, "expected a number of tokens, such as 4096 or 4K"),
    ({"dtype": "half"}, Kind.CHANGED, "a CPU computes in bfloat16 or float32"),
    ({"dtype": "int3"}, Kind.NOT_SUPPORTED, "dtype: expected one of auto, bfloat16, float16, float32"),
    ({"max_logprobs": 100}, Kind.CHANGED, "a token has up to 20 alternatives"),
    ({"enable_chunked_prefill": False}, Kind.CHANGED, "prompts are computed in chunks"),
    ({"gpu_memory_utilization": 0.9}, Kind.LEFT_OUT, "on a CPU, engine.kv_cache_memory_gib"),
    ({"max_num_seqs": 600}, Kind.CHANGED, "a step takes 1202 tokens"),
    ({"max_num_batched_tokens": 64}, Kind.CHANGED, "it also bounds max_num_seqs, which is not set: taken as 32"),
    ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, Kind.CHANGED, "a step takes 65 tokens"),
    ({"compilation_config": 3}, Kind.LEFT_OUT, "how a step is computed; chunkserve chooses that itself (given: 3)"),
    ({"disable_log_stats": True}, Kind.LEFT_OUT, "chunkserve has logs and metrics of its own"),
    ({"max_loras": 4}, Kind.LEFT_OUT, "it has no effect without enable_lora"),
    ({"limit_mm_per_prompt": {"video": 1}}, Kind.LEFT_OUT, "limit_mm_per_prompt.video: requests bring text"),
    ({"speculative_config": {"method": "eagle", "model": "e"}}, Kind.LEFT_OUT, "answers are the same"),
    ({"served_model_name": "x"}, Kind.NOT_SUPPORTED, "served_model_name: set model_loading_config instead"),
    ({"enable_auto_tool_choice": False}, Kind.LEFT_OUT, "calls are parsed in either case"),
    ({"runner": "pooling"}, Kind.CHANGED, "/v1/embeddings is served beside answers"),
    ({"max_sequences": 3}, Kind.NOT_SUPPORTED, "max_sequences: chunkserve knows no such engine argument (given: 3)"),
    ({"allowed_media_domains": 3}, Kind.NOT_SUPPORTED, "allowed_media_domains: not a value that vLLM takes here"),
]


@pytest.mark.parametrize(("kwargs", "kind", "text"), NOTED, ids=str)
def test_an_argument_without_a_counterpart_is_a_line_with_the_reason(
    kwargs: dict[str, Any], kind: Kind, text: str
) -> None:
    (note,) = with_kwargs(**kwargs).notes
    assert note.kind is kind
    assert str(note).startswith(f"{kind}: engine_kwargs.")
    assert text in str(note)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tensor_parallel_size": 1, "trust_remote_code": False, "seed": 0, "tokenizer_mode": "auto"},
        {"max_model_len": None, "quantization": None, "distributed_executor_backend": "ray"},
        {"generation_config": "vllm", "max_logprobs": 20, "enforce_eager": True},
    ],
)
def test_a_value_that_changes_nothing_needs_no_line(kwargs: dict[str, Any]) -> None:
    assert lines(with_kwargs(**kwargs)) == []


@pytest.mark.parametrize(
    ("kwargs", "sampling"),
    [
        ({}, {"source": "model"}),
        ({"generation_config": "auto"}, {"source": "model"}),
        ({"generation_config": "vllm"}, None),
        (
            {"generation_config": "vllm", "override_generation_config": {"temperature": 0.6, "top_k": 20}},
            {"temperature": 0.6, "top_k": 20},
        ),
    ],
)
def test_requests_get_the_sampling_that_they_had_with_vllm(kwargs: dict[str, Any], sampling: Any) -> None:
    taking = with_kwargs(**kwargs)
    assert taking.get("default_sampling") == sampling
    assert lines(taking) == []


def test_a_bool_is_not_taken_for_the_number_that_it_equals_in_python() -> None:
    (note,) = with_kwargs(tensor_parallel_size=True).notes
    assert note.kind is Kind.NOT_SUPPORTED


def test_the_larger_word_on_the_kv_cache_wins_as_in_vllm() -> None:
    taking = with_kwargs(gpu=True, kv_cache_memory_bytes=2**30, gpu_memory_utilization=0.5)
    assert taking.get("engine.gpu_memory_utilization") is None
    assert lines(taking) == [
        "left out: engine_kwargs.gpu_memory_utilization: kv_cache_memory_bytes says how large the KV cache is "
        "(given: 0.5)"
    ]


def test_thoughts_stay_in_the_text_as_in_vllm_unless_a_parser_is_asked_for() -> None:
    assert converted().get("reasoning_parser") == "none"


def test_a_long_value_is_shortened_in_its_line() -> None:
    (note,) = with_kwargs(hf_overrides={"a": "x" * 500}).notes
    assert len(str(note)) < 250


# --- the rest of the config -------------------------------------------------------------------------------------------

REST: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "model", "org/m"),
    ({}, "served_model_name", "m"),
    ({"model_loading_config": {"model_id": "org/x"}}, "model", "org/x"),
    ({}, "engine_num_gpus", 1),
    ({}, "engine.device", "cuda"),
    (CPU, "engine_num_gpus", None),
    ({"accelerator_type": "A10"}, "engine_accelerator_type", "A10G"),
    ({"placement_group_config": {"bundle_per_worker": {"CPU": 3}}}, "engine_num_cpus", 3),
    ({"placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}]}}, "engine_num_gpus", 1),
    ({"deployment_config": {"num_replicas": 3}}, "engine_replicas", 3),
    ({"deployment_config": {"num_replicas": "auto"}}, "autoscaling.max_replicas", 100),
    ({"deployment_config": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}}, "engine_replicas", 2),
    ({"deployment_config": {"autoscaling_config": {"max_replicas": 4}}}, "autoscaling.min_replicas", 1),
    (
        {"deployment_config": {"autoscaling_config": {"max_replicas": 4, "downscale_delay_s": 60}}},
        "autoscaling.downscale_delay_s",
        60,
    ),
    (
        {"deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4, "initial_replicas": 2}}},
        "engine_replicas",
        2,
    ),
    ({"deployment_config": {"health_check_period_s": 7}}, "health_check_period_s", 7),
    ({"deployment_config": {"ray_actor_options": {"num_cpus": 4}}}, "engine_num_cpus", 4),
    ({"experimental_configs": {"num_ingress_replicas": 3}}, "ingress_replicas", 3),
    ({"lora_config": {"max_num_adapters_per_replica": 4}}, "engine.max_loras", 4),
    ({"runtime_env": {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "4"}}} | CPU, "engine.kv_cache_memory_gib", 4.0),
    ({"log_engine_metrics": True}, "model", "org/m"),
    ({"server_cls": "ray.serve.llm:LLMServer", "llm_engine": "vLLM"}, "model", "org/m"),
]


@pytest.mark.parametrize(("fields", "setting", "value"), REST, ids=str)
def test_a_field_with_a_counterpart_is_that_setting(fields: dict[str, Any], setting: str, value: Any) -> None:
    taking = converted(**fields)
    assert taking.get(setting) == value
    assert lines(taking) == []


REST_NOTED: list[tuple[dict[str, Any], Kind, str]] = [
    (
        {"deployment_config": {"autoscaling_config": {"max_replicas": 2, "target_ongoing_requests": 8}}},
        Kind.LEFT_OUT,
        "target_ongoing_requests: replicas follow the engines' tokens",
    ),
    (
        {"deployment_config": {"autoscaling_config": {"max_replicas": 2, "look_back_period_s": 8}}},
        Kind.LEFT_OUT,
        "look_back_period_s: the autoscaler is chunkserve's own",
    ),
    ({"deployment_config": {"max_ongoing_requests": 64}}, Kind.LEFT_OUT, "an engine runs engine.max_num_seqs requests"),
    ({"deployment_config": {"max_queued_requests": 9}}, Kind.CHANGED, "it bounds what waits for each engine"),
    ({"deployment_config": {"graceful_shutdown_timeout_s": 9}}, Kind.CHANGED, "taken as drain_timeout_s"),
    ({"deployment_config": {"name": "x"}}, Kind.LEFT_OUT, "the deployments are called Engine and Ingress"),
    ({"deployment_config": {"ray_actor_options": {"num_gpus": 2}}}, Kind.NOT_SUPPORTED, "an engine takes a whole GPU"),
    ({"deployment_config": {"ray_actor_options": {"memory": 2}}}, Kind.LEFT_OUT, "ray_actor_options.memory"),
    ({"deployment_config": 3}, Kind.NOT_SUPPORTED, "deployment_config: expected a mapping (given: 3)"),
    ({"placement_group_config": {"bundles": [{"GPU": 1}] * 2}}, Kind.NOT_SUPPORTED, "has one bundle"),
    ({"placement_group_config": {"bundles": [{"GPU": 0.5}]}}, Kind.NOT_SUPPORTED, "an engine takes a whole GPU"),
    ({"accelerator_config": {"kind": "tpu"}}, Kind.NOT_SUPPORTED, "no TPU is supported"),
    ({"lora_config": {"dynamic_lora_loading_path": "s3://a/b"}}, Kind.NOT_SUPPORTED, "name each in lora_adapters"),
    ({"model_loading_config": {"model_id": "m", "model_source": "s3://a/b"}}, Kind.NOT_SUPPORTED, "download it first"),
    (
        {"model_loading_config": {"model_id": "m", "model_source": {"bucket_uri": "gs://a"}}},
        Kind.NOT_SUPPORTED,
        "download it first",
    ),
    (
        {"model_loading_config": {"model_id": "m", "tokenizer_source": "org/t"}},
        Kind.NOT_SUPPORTED,
        "the tokenizer is read beside the weights",
    ),
    ({"runtime_env": {"env_vars": {"VLLM_USE_V1": "1"}}}, Kind.LEFT_OUT, "nothing here reads vLLM's variables"),
    ({"log_engine_metrics": False}, Kind.LEFT_OUT, "/metrics always has the engines' numbers"),
    ({"callback_config": {"callback_class": "my.Callback"}}, Kind.NOT_SUPPORTED, "no code is called while a replica"),
    ({"experimental_configs": {"stream_batching_interval_ms": 9}}, Kind.LEFT_OUT, "sends each token as it comes"),
    ({"experimental_configs": {"dp_size_per_node": 9}}, Kind.LEFT_OUT, "has no counterpart"),
    ({"server_cls": "my.app:Server"}, Kind.NOT_SUPPORTED, "server_cls: the server class is chunkserve's own"),
    ({"acelerator_type": "L4"}, Kind.NOT_SUPPORTED, "acelerator_type: Ray Serve LLM has no such field"),
]


@pytest.mark.parametrize(("fields", "kind", "text"), REST_NOTED, ids=str)
def test_a_field_without_a_counterpart_is_a_line_with_the_reason(fields: dict[str, Any], kind: Kind, text: str) -> None:
    (note,) = converted(**fields).notes
    assert note.kind is kind
    assert text in str(note)


def test_behind_rays_ingress_replicas_adapters_and_ingresses_are_left_to_ray() -> None:
    fields = {
        "deployment_config": {"num_replicas": 3, "max_ongoing_requests": 4},
        "experimental_configs": {"num_ingress_replicas": 3},
        "lora_config": {"dynamic_lora_loading_path": "s3://a/b", "max_num_adapters_per_replica": 2},
    }
    taking = convert_engine({**LOADING, **CPU, **fields}, base)
    assert lines(taking) == []
    assert taking.get("engine.max_loras") == 2
    assert taking.get("engine_replicas") is None


# --- nothing is lost, and what is written is accepted -----------------------------------------------------------------

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3000),
    st.floats(0, 2, allow_nan=False),
    st.sampled_from(["auto", "none", "fp8", "4k", "hermes", "", "s3://a/b", "float16"]),
    st.lists(st.sampled_from(["a", "law=/x"]), max_size=2),
    st.dictionaries(st.sampled_from(["image", "method", "GPU", "CPU", "num_replicas", "kind"]), st.integers(0, 3)),
)
NAMES = sorted({*_READERS, *_TOGETHER, *UNTAKEN, "some_new_argument"})


@given(kwargs=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=6), gpu=st.booleans())
def test_every_argument_is_a_setting_or_a_line_or_a_value_that_changes_nothing(
    kwargs: dict[str, Any], gpu: bool
) -> None:
    fields = {} if gpu else CPU
    taking = convert({**LOADING, **fields, "engine_kwargs": kwargs}, base)
    noted = {note.path.split(".")[1] for note in taking.notes}
    neutral = {name for name, value in kwargs.items() if value is None or any(value == one for one in _neutral(name))}
    for name in kwargs.keys() - noted - neutral:
        without = convert({**LOADING, **fields, "engine_kwargs": {**kwargs, name: None}}, base)
        is_default = base_value(gpu, name) == kwargs[name]
        assert without.args != taking.args or is_default or name in _QUIET, name


_QUIET = {
    *("enforce_eager", "enable_chunked_prefill", "max_logprobs", "load_format", "runner", "task", "enable_lora"),
    *("tool_call_parser", "reasoning_parser", "limit_mm_per_prompt", "lora_modules", "speculative_config", "max_loras"),
    *("max_num_batched_tokens", "max_num_seqs"),
}
"""Arguments some of whose values change nothing; the tables above have those that do."""


def _neutral(name: str) -> tuple[Any, ...]:
    return UNTAKEN[name].neutral if name in UNTAKEN else ()


def base_value(gpu: bool, name: str) -> Any:
    return base(gpu).get("engine", {}).get(name)


VALID: Mapping[str, st.SearchStrategy[Any]] = {
    "max_model_len": st.integers(1, 10**6) | st.sampled_from(["32k", -1]),
    "max_num_seqs": st.integers(1, 5000),
    "max_num_batched_tokens": st.integers(2, 20000),
    "block_size": st.sampled_from([8, 16, 64]),
    "gpu_memory_utilization": st.floats(0.1, 1),
    "kv_cache_memory_bytes": st.integers(2**28, 2**34),
    "num_gpu_blocks_override": st.integers(1, 10**5),
    "kv_offloading_size": st.floats(0.5, 64),
    "enable_prefix_caching": st.booleans(),
    "enforce_eager": st.booleans(),
    "dtype": st.sampled_from(["auto", "half", "bfloat16", "float", "float16", "float32"]),
    "kv_cache_dtype": st.sampled_from(["auto", "fp8", "int8", "fp8_e5m2"]),
    "enable_lora": st.booleans(),
    "max_loras": st.integers(1, 8),
    "max_lora_rank": st.sampled_from([8, 16, 64]),
    "lora_modules": st.just(["law=/a/law"]),
    "tensor_parallel_size": st.integers(1, 8),
    "tool_call_parser": st.sampled_from(["hermes", "granite"]),
    "reasoning_parser": st.sampled_from(["qwen3", "granite"]),
    "speculative_config": st.sampled_from(
        [
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
            {"method": "suffix", "num_speculative_tokens": 24},
            {"model": "org/small", "num_speculative_tokens": 3},
            {"method": "eagle3", "model": "e", "num_speculative_tokens": 3},
        ]
    ),
}


@given(
    kwargs=st.fixed_dictionaries({}, optional=dict(VALID)),
    hardware=st.sampled_from(
        [CPU, {}, {"accelerator_type": "L4"}, {"placement_group_config": {"bundles": [{"GPU": 1}]}}]
    ),
    replicas=st.sampled_from(
        [
            {},
            {"num_replicas": 2},
            {"num_replicas": "auto"},
            {"autoscaling_config": {"min_replicas": 0, "max_replicas": 3}},
        ]
    ),
    lora=st.sampled_from([None, {"dynamic_lora_loading_path": "s3://a/b", "max_num_adapters_per_replica": 2}]),
)
def test_what_vllm_takes_becomes_settings_that_are_accepted(
    kwargs: dict[str, Any], hardware: dict[str, Any], replicas: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    converted(engine_kwargs=kwargs, deployment_config=replicas, lora_config=lora, **hardware)


def test_no_argument_is_both_taken_along_and_left_out() -> None:
    assert not {*_READERS, *_TOGETHER} & UNTAKEN.keys()


RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"engine_num_gpus": 2}),
    ({"placement_group_config": {"bundles": [{"GPU": 1, "CPU": 3}] * 2}}, {"engine_num_gpus": 2, "engine_num_cpus": 6}),
    ({"placement_group_config": {"bundles": [{"GPU": 2, "CPU": 3}]}}, {"engine_num_gpus": 2, "engine_num_cpus": 3}),
    ({"placement_group_config": {"bundle_per_worker": {"GPU": 1, "CPU": 3}}}, {"engine_num_cpus": 6}),
    (
        {"placement_group_config": {"bundles": [{"GPU": 1}] * 2, "strategy": "SPREAD"}},
        {"tensor_parallel_placement": "spread"},
    ),
    ({"deployment_config": {"ray_actor_options": {"num_gpus": 2}}}, {"engine_num_gpus": 2}),
    (CPU, {"engine_num_gpus": None}),
]


@pytest.mark.parametrize(("hardware", "settings"), RANKS, ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_ranks_are_taken_along_with_a_gpu_each(hardware: dict[str, Any], settings: dict[str, Any], own: bool) -> None:
    """Regression: with ranks by our own setting, there was one GPU for all, and the config was refused."""
    ranks = {"tensor_parallel_size": 2}
    taking = converted(engine_kwargs={"chunkserve": {"engine": ranks}} if own else ranks, **hardware)
    for setting, value in {"engine.tensor_parallel_size": 2, **settings}.items():
        assert taking.get(setting) == value, setting
    assert lines(taking) == []


def test_a_gpu_for_several_ranks_is_not_enough() -> None:
    taking = converted(engine_kwargs={"tensor_parallel_size": 2}, placement_group_config={"bundles": [{"GPU": 1}]})
    (note,) = taking.notes
    assert note.kind is Kind.NOT_SUPPORTED
    assert "a whole GPU for each rank" in note.text


def test_the_fields_are_listed_in_order() -> None:
    assert list(FIELDS) == sorted(FIELDS)


def test_reading_a_config_needs_neither_ray_nor_vllm() -> None:
    code = "import sys, serve_app.llm_config.convert; print('ray' in sys.modules, 'vllm' in sys.modules)"
    assert run_python(code).split() == ["False", "False"]
    assert sys.modules
