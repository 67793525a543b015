"""Owns the names of vLLM's engine arguments that have no counterpart here, with the reason for each.
Never has a name that is taken along: `engine` has those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Untaken:
    """Why an argument is not taken along. `neutral`: values that change nothing here, and need no note."""

    why: str
    matters: bool
    """Whether answers, or where the model runs, depend on it."""
    neutral: tuple[Any, ...] = ()


_ONE_DEVICE = "here tensor_parallel_size alone divides a model; more replicas use more devices"
_CHOOSES = "how a step is computed; chunkserve chooses that itself"
_LOADS = "how weights are loaded; chunkserve reads safetensors and GGUF files in its own way"
_MEASURES = "chunkserve has logs and metrics of its own"
_MEMORY = "chunkserve moves no weights to other memory; for KV, set engine.kv_tiers"
_IN_MODEL = "chunkserve reads it from the model's directory alone"
_OWN_HTTP = "HTTP is Ray Serve's, and not the engine's"


def _each(names: str, why: str, *neutral: Any, matters: bool = False) -> Iterator[tuple[str, Untaken]]:
    for name in names.split():
        yield name, Untaken(why, matters, neutral)


UNTAKEN: dict[str, Untaken] = dict(
    (
        *_each("model served_model_name", "set model_loading_config instead, as in Ray Serve LLM", matters=True),
        # where it runs
        *_each(
            "pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size nnodes",
            _ONE_DEVICE,
            1,
            matters=True,
        ),
        *_each(
            "enable_expert_parallel",
            "set chunkserve.engine.expert_parallel_size: ranks share experts on CPUs alone",
            False,
            matters=True,
        ),
        *_each("enable_eplb", _ONE_DEVICE, False, matters=True),
        *_each("data_parallel_rank data_parallel_size_local data_parallel_address data_parallel_backend", _ONE_DEVICE),
        *_each("distributed_executor_backend", "chunkserve starts an engine's ranks itself", "mp", "ray", "uni"),
        *_each("device_ids numa_bind numa_bind_nodes numa_bind_cpus", "Ray places replicas", False),
        *_each(
            "kv_transfer_config ec_transfer_config kv_events_config",
            "an engine's KV cache is its own: prefill and decoding run in the same engine",
            matters=True,
        ),
        # what the model is
        *_each("revision code_revision tokenizer_revision", "name a directory with that revision instead"),
        *_each("trust_remote_code", "no code of a checkpoint is run; its architecture must be one of ours", False),
        *_each("hf_overrides hf_config_path model_class_overrides", _IN_MODEL, {}, matters=True),
        *_each("tokenizer tokenizer_mode", _IN_MODEL, "auto", "hf", "fast", matters=True),
        *_each("chat_template", f"{_IN_MODEL}: put it there as chat_template.jinja", matters=True),
        *_each("chat_template_content_format", "it is detected from the template", "auto"),
        *_each("default_chat_template_kwargs", "requests may send chat_template_kwargs", {}, matters=True),
        *_each("trust_request_chat_template", "a request cannot bring a chat template", False, matters=True),
        *_each("response_role", "answers have the role assistant", "assistant", matters=True),
        *_each("model_impl", "models are chunkserve's own", "auto", "vllm"),
        *_each("convert", "set pooler_config instead", "auto", "none", matters=True),
        *_each("logits_processors reasoning_parser_plugin tool_parser_plugin tool_server", "no code is loaded",
               [], "", matters=True),
        *_each("logprobs_mode", "log-probabilities are those of the model before sampling", "raw_logprobs",
               matters=True),
        *_each("skip_tokenizer_init tokens_only enable_prompt_embeds", "an app takes and gives text", False,
               matters=True),
        *_each("seed", "a request without a seed of its own is drawn at random", 0),
        # how it runs
        *_each(
            "compilation_config attention_backend attention_config kernel_config optimization_level performance_mode "
            "async_scheduling cudagraph_capture_sizes max_cudagraph_capture_size moe_backend linear_backend "
            "all2all_backend mamba_config disable_custom_all_reduce disable_cascade_attn disable_sliding_window "
            "disable_hybrid_kv_cache_manager enable_dbo prefix_caching_hash_algo enable_flashinfer_autotune "
            "scheduler_cls worker_cls worker_extension_cls renderer_num_workers additional_config ir_op_priority "
            "use_v2_block_manager num_scheduler_steps preemption_mode",
            _CHOOSES,
        ),
        *_each("scheduling_policy", "a request's priority always counts", "fcfs", "priority"),
        *_each("max_num_queued_reqs", "set deployment_config.max_queued_requests"),
        *_each(
            "structured_outputs_config guided_decoding_backend",
            "grammars have one backend, which every constraint goes to",
        ),
        *_each("enable_auto_tool_choice", "calls are parsed in either case, in the format of the chat template", True),
        *_each("exclude_tools_when_tool_choice_none", "tools are left out of the prompt then", True),
        *_each("enable_prompt_tokens_details", "usage always says how much of a prompt was cached", True, False),
        *_each("enable_force_include_usage", "a stream has its usage if the request asks for it", False, matters=True),
        *_each("return_tokens_as_token_ids", "a request asks for it itself", False, matters=True),
        *_each(
            "download_dir safetensors_load_strategy max_parallel_loading_workers model_loader_extra_config "
            "ignore_patterns use_tqdm_on_load pt_load_map_location config_format hf_token",
            _LOADS,
        ),
        *_each("cpu_offload_gb swap_space offload_backend", _MEMORY, 0),
        *_each("kv_offloading_backend", "chunkserve has its own", "native"),
        *_each("max_cpu_loras lora_dtype fully_sharded_loras specialize_active_lora",
               "adapters are kept in the type of the weights, up to max_loras of them", "auto", False),
        *_each("enable_sleep_mode", "an engine that is not needed is scaled away instead", False),
        *_each(
            "mm_processor_kwargs media_io_kwargs mm_processor_cache_gb mm_processor_cache_type mm_encoder_tp_mode "
            "mm_encoder_attn_backend skip_mm_profiling interleave_mm_strings",
            "images are read and cached in chunkserve's own way",
        ),
        *_each("language_model_only", "a model that takes images takes them", False),
        *_each("allowed_local_media_path", "a request cannot name a file of the server", "", matters=True),
        # what is told of it
        *_each(
            "disable_log_stats enable_log_requests disable_log_requests max_log_len enable_log_outputs "
            "enable_log_deltas aggregate_engine_logging show_hidden_metrics_for_version kv_cache_metrics "
            "cudagraph_metrics enable_mfu_metrics collect_detailed_traces log_level log_config_file logging_config "
            "profiler_config enable_server_load_tracking enable_per_request_metrics uvicorn_log_level "
            "disable_uvicorn_access_log log_error_stack",
            _MEASURES,
        ),
        *_each("otlp_traces_endpoint", "set tracing.exporter and tracing.endpoint, which is OTLP over HTTP"),
        *_each("api_key", "set auth.keys_file; `chunkserve keys` makes one", matters=True),
        *_each(
            "host port uds root_path ssl_keyfile ssl_certfile ssl_ca_certs allowed_origins allowed_methods "
            "allowed_headers allow_credentials middleware enable_request_id_headers disable_fastapi_docs",
            _OWN_HTTP,
        ),
    )
)  # fmt: skip
UNKNOWN = Untaken("chunkserve knows no such engine argument", matters=True)
