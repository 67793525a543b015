"""Reads what an LLMConfig serves: the model, its name, its adapters, and the environment that it runs in.
Never reads a file of the model."""

from __future__ import annotations

from typing import Any

from serve_app.llm_config.taking import Taking

REMOTE = ("s3://", "gs://", "abfss://", "azure://", "pyarrow-")
"""Beginnings of the places that Ray Serve LLM downloads from."""
_LOADING, _LORA, _CALLBACK = "model_loading_config", "lora_config", "callback_config"
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_MOST_ADAPTERS = 16
"""Ray Serve LLM's default."""
_SERVERS = ("LLMServer", "ChunkserveServer")
"""Those whose place is taken."""
_NO_CALLBACK = "CallbackBase"
"""Ray's own, which does nothing."""


def read_model(taking: Taking, config: dict[str, Any]) -> None:
    """Read model_loading_config: the name that clients ask for, and where the model is."""
    given = taking.mapping(_LOADING, config.get(_LOADING))
    name, source = given.get("model_id"), given.get("model_source")
    if name is None:
        taking.unsupported(f"{_LOADING}.model_id", None, "expected the name that clients ask for")
        return
    if not isinstance(source, str | None) or str(source).startswith(REMOTE):
        text = "download it first, and name the directory: models are read from directories, hub ids and GGUF files"
        taking.unsupported(f"{_LOADING}.model_source", source, text)
        source = None
    taking.put("model", source or name)
    if source not in (None, name):
        taking.put("served_model_name", name)
    tokenizer = given.get("tokenizer_source")
    if tokenizer not in (None, source or name):
        taking.unsupported(f"{_LOADING}.tokenizer_source", tokenizer, "the tokenizer is read beside the weights")
    known = {"model_id", "model_source", "tokenizer_source"}
    taking.leave_out_rest(_LOADING, given, known, "Ray Serve LLM has no such field")


def read_lora(taking: Taking, config: dict[str, Any]) -> None:
    """Read lora_config. Our own application downloads nothing: its adapters come from directories."""
    given = taking.mapping(_LORA, config.get(_LORA))
    if not given:
        return
    most = given.get("max_num_adapters_per_replica", _MOST_ADAPTERS)
    held = taking.get("engine.max_loras") or 0
    are_numbers = isinstance(most, int) and isinstance(held, int)  # else the setting itself refuses it
    taking.put("engine.max_loras", max(most, held) if are_numbers else most)
    if not taking.own_app:
        return
    if (place := given.get("dynamic_lora_loading_path")) is not None:
        text = "download adapters to a directory and name each in lora_adapters, or set allow_lora_updates to load them"
        taking.unsupported(f"{_LORA}.dynamic_lora_loading_path", place, text)
    known = {"max_num_adapters_per_replica", "dynamic_lora_loading_path"}
    taking.leave_out_rest(_LORA, given, known, "nothing is downloaded")


def read_environment(taking: Taking, environment: Any) -> None:
    """Read what a runtime environment says of vLLM. The rest of it belongs to the application, not to its settings."""
    variables = taking.mapping("runtime_env", environment).get("env_vars")
    for name, value in taking.mapping("runtime_env.env_vars", variables).items():
        if name == _KV_SPACE and not taking.on_gpu and str(value).replace(".", "", 1).isdigit() and float(value) > 0:
            taking.put("engine.kv_cache_memory_gib", float(value))
        elif name.startswith("VLLM_"):
            taking.leave_out(f"runtime_env.env_vars.{name}", value, "nothing here reads vLLM's variables")


def read_rest(taking: Taking, config: dict[str, Any]) -> None:
    """Read the few fields that concern neither the model nor its replicas."""
    if config.get("log_engine_metrics") is False:
        taking.leave_out("log_engine_metrics", False, "/metrics always has the engines' numbers")
    callback = taking.mapping(_CALLBACK, config.get(_CALLBACK))
    kind = callback.get("callback_class")
    if kind is not None and not str(getattr(kind, "__name__", kind)).endswith(_NO_CALLBACK):
        taking.unsupported(f"{_CALLBACK}.callback_class", kind, "no code is called while a replica starts")
    server = config.get("server_cls")
    if server is not None and not str(getattr(server, "__name__", server)).endswith(_SERVERS):
        taking.unsupported("server_cls", server, "the server class is chunkserve's own")
    experimental = taking.mapping("experimental_configs", config.get("experimental_configs"))
    if (count := experimental.get("num_ingress_replicas")) is not None and taking.own_app:
        taking.put("ingress_replicas", count)
    if (interval := experimental.get("stream_batching_interval_ms")) is not None:
        text = "a stream sends each token as it comes"
        taking.leave_out("experimental_configs.stream_batching_interval_ms", interval, text)
    known = {"num_ingress_replicas", "stream_batching_interval_ms"}
    taking.leave_out_rest("experimental_configs", experimental, known, "Ray Serve LLM's experiment has no counterpart")
