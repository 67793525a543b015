"""Reads `engine_kwargs`, which are vLLM's engine arguments, as settings of the engine and of the application.
Never takes an argument silently: each is taken along, or gets a note with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

from engine.config import EngineConfig, choices_of
from engine.protocol import MAX_LOGPROBS
from serve_app.llm_config.engine_rules import UNKNOWN, UNTAKEN
from serve_app.llm_config.taking import Taking
from serve_app.settings.application import AppSettings
from serve_app.settings.images import ImageSettings
from serve_app.settings.sampling import SamplingSettings

OWN = "chunkserve"
"""An engine argument of ours: settings of this project, which win over everything else."""
PATH = "engine_kwargs"
_GIB = 2**30
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30, "": 1}
_DTYPES = {"half": "float16", "float": "float32"}
_KV_TYPES = {"auto": "auto", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "int8": "int8"}
_PACKED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "auto-round")
"""Kinds of checkpoints that are recognised by their own config."""

Reader = Callable[[Taking, str, Any], None]


def read_engine_kwargs(taking: Taking, kwargs: Mapping[str, Any], below: Mapping[str, Any]) -> None:
    """Read all arguments, of which none is null. `below`: the engine's settings that the result is put over."""
    for name, value in kwargs.items():
        path = f"{PATH}.{name}"
        if name == OWN or name in _TOGETHER:
            continue
        if (reader := _READERS.get(name)) is None:
            _leave(taking, path, name, value)
            continue
        try:
            reader(taking, path, value)
        except (TypeError, ValueError, AttributeError):
            taking.unsupported(path, value, "not a value that vLLM takes here")
    _settle_adapters(taking, kwargs)
    _settle_sampling(taking, kwargs)
    _settle_memory(taking)
    _settle_step(taking, below)


def _leave(taking: Taking, path: str, name: str, value: Any) -> None:
    rule = UNTAKEN.get(name, UNKNOWN)
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in rule.neutral):
        return
    note = taking.unsupported if rule.matters else taking.leave_out
    note(path, value, rule.why)


# --- one argument each ------------------------------------------------------------------------------------------------


def _same(setting: str, taking: Taking, path: str, value: Any) -> None:
    taking.put(setting, value)


def _tokens(setting: str, taking: Taking, path: str, value: Any) -> None:
    """Numbers of tokens may be written as 32k or 32K."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(value)):
        taking.put(setting, int(float(found[1]) * _UNITS[found[2]]))
    elif value in (-1, "auto") and setting == "engine.max_model_len":
        text = "what fits into memory is not known before the start: it is what the checkpoint was trained for"
        taking.changed(path, value, text)
    else:
        taking.unsupported(path, value, "expected a number of tokens, such as 4096 or 4K")


def _ranks(taking: Taking, path: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError
    if value > 1 and not taking.own_app:
        text = "behind Ray Serve LLM's own ingress an engine is one process; an application of `serve run` has ranks"
        taking.unsupported(path, value, text)
    elif value > 1:
        taking.put("engine.tensor_parallel_size", value)


def _dtype(taking: Taking, path: str, value: Any) -> None:
    name = _DTYPES.get(str(value), str(value).removeprefix("torch."))
    if name == "float16" and not taking.on_gpu:
        taking.changed(path, value, "a CPU computes in bfloat16 or float32: taken as auto")
    elif name in (known := choices_of(EngineConfig)["dtype"]):
        taking.put("engine.dtype", name)
    else:
        taking.unsupported(path, value, f"expected one of {', '.join(known)}")


def _quantization(taking: Taking, path: str, value: Any) -> None:
    if str(value) in _PACKED:
        taking.leave_out(path, value, "a packed checkpoint is recognised by its own config")
    elif str(value) in ("fp8", "int8"):
        text = "a checkpoint in that type is recognised; to round another one, set engine.quantize int8"
        taking.leave_out(path, value, text)
    else:
        taking.unsupported(path, value, f"expected one of {', '.join((*_PACKED, 'fp8'))}")


def _kv_cache_dtype(taking: Taking, path: str, value: Any) -> None:
    if str(value) in _KV_TYPES:
        taking.put("engine.kv_cache_dtype", _KV_TYPES[str(value)])
    elif value in ("bfloat16", "float16", "float32"):
        taking.leave_out(path, value, "an unquantized KV cache has the type of dtype")
    else:
        taking.unsupported(path, value, f"expected one of {', '.join(_KV_TYPES)}")


def _load_format(taking: Taking, path: str, value: Any) -> None:
    if value == "dummy":
        taking.put("engine.load_format", "dummy")
    elif value not in ("auto", "hf", "safetensors", "gguf"):
        taking.leave_out(path, value, "weights are read from safetensors and GGUF files of a local directory or a hub")


def _gpu_memory(taking: Taking, path: str, value: Any) -> None:
    if taking.on_gpu:
        taking.put("engine.gpu_memory_utilization", value)
    else:
        taking.leave_out(path, value, "on a CPU, engine.kv_cache_memory_gib bounds the KV cache")


def _host_memory(taking: Taking, path: str, value: Any) -> None:
    if value:
        taking.put("engine.kv_tiers.host_memory_gib", value)


def _eager(taking: Taking, path: str, value: Any) -> None:
    if value and taking.on_gpu:
        taking.put("engine.cuda_graphs", "none")


def _chunked(taking: Taking, path: str, value: Any) -> None:
    if not value:
        whole = "to compute each whole, set engine.scheduler.enable_chunked_prefill false"
        taking.changed(path, value, f"prompts are computed in chunks of at most max_num_batched_tokens; {whole}")


def _parser(setting: str, taking: Taking, path: str, value: Any) -> None:
    known = get_args(AppSettings.model_fields[setting].annotation)
    if value in known:
        taking.put(setting, value)
    elif value:
        taking.unsupported(path, value, f"expected one of {', '.join(known)}")


def _max_logprobs(taking: Taking, path: str, value: Any) -> None:
    if isinstance(value, int) and not 0 <= value <= MAX_LOGPROBS:
        taking.changed(path, value, f"a token has up to {MAX_LOGPROBS} alternatives")


def _images(taking: Taking, path: str, value: Any) -> None:
    for kind, limit in taking.mapping(path, value).items():
        count = limit.get("count") if isinstance(limit, dict) else limit
        if kind != "image":
            taking.leave_out(f"{path}.{kind}", limit, "requests bring text and images alone")
        elif count and count != ImageSettings().max_per_request:
            taking.put("images.max_per_request", count)
        elif not count:
            taking.unsupported(f"{path}.{kind}", limit, "a model that takes images takes at least one")


def _hosts(taking: Taking, path: str, value: Any) -> None:
    taking.put("images.allowed_hosts", [value] if isinstance(value, str) else list(value))


def _pooling(taking: Taking, path: str, value: Any) -> None:
    given = taking.mapping(path, value)
    kind = str(given.get("pooling_type") or given.get("seq_pooling_type") or "").lower()
    if kind in ("mean", "last"):
        taking.put("pooling", kind)
    else:
        taking.unsupported(path, value, "expected pooling_type MEAN or LAST")


def _runner(taking: Taking, path: str, value: Any) -> None:
    if value in ("pooling", "embed", "embedding"):
        if taking.get("pooling") is None:
            taking.put("pooling", "last")
            taking.changed(path, value, "/v1/embeddings is served beside answers, with pooling last; check the model's")
    elif value not in ("auto", "generate"):
        taking.unsupported(path, value, "expected auto, generate or pooling")


def _speculative(taking: Taking, path: str, value: Any) -> None:
    given = taking.mapping(path, value)
    method, model = given.get("method"), given.get("model")
    if method in ("ngram", "suffix"):
        taking.put("engine.speculative.method", method)
        for theirs, ours in (("prompt_lookup_max", "max_match"), ("prompt_lookup_min", "min_match")):
            if theirs in given:
                taking.put(f"engine.speculative.{ours}", given[theirs])
    elif model is not None and method in (None, "draft_model") and not taking.on_gpu:
        taking.put("engine.speculative.method", "draft_model")
        taking.put("engine.speculative.model", model)
    else:
        taking.leave_out(path, value, "drafts are looked up, or come from a draft model on a CPU; answers are the same")
        return
    if (count := given.get("num_speculative_tokens")) is not None:
        taking.put("engine.num_speculative_tokens", count)
    read = {"method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
    taking.leave_out_rest(path, given, read, "chunkserve drafts as many tokens as are expected to pay")


def _lora_modules(taking: Taking, path: str, value: Any) -> None:
    for number, module in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(module, str) and "=" in module:
            name, _, directory = module.partition("=")
        elif isinstance(module, dict) and {"name", "path"} <= module.keys():
            name, directory = module["name"], module["path"]
        else:
            taking.unsupported(f"{path}.{number}", module, "expected name=directory")
            continue
        taking.args.setdefault("lora_adapters", {})[str(name)] = str(directory)


_READERS: dict[str, Reader] = {
    "max_model_len": partial(_tokens, "engine.max_model_len"),
    "max_num_batched_tokens": partial(_tokens, "engine.max_num_batched_tokens"),
    "max_num_seqs": partial(_same, "engine.max_num_seqs"),
    "tensor_parallel_size": _ranks,
    "block_size": partial(_same, "engine.block_size"),
    "enable_prefix_caching": partial(_same, "engine.enable_prefix_caching"),
    "num_gpu_blocks_override": partial(_same, "engine.num_kv_blocks"),
    "long_prefill_token_threshold": partial(_same, "engine.scheduler.long_prefill_token_threshold"),
    "max_num_partial_prefills": partial(_same, "engine.scheduler.max_partial_prefills"),
    "max_lora_rank": partial(_same, "engine.max_lora_rank"),
    "kv_cache_memory_bytes": lambda taking, _, value: taking.put("engine.kv_cache_memory_gib", value / _GIB),
    "gpu_memory_utilization": _gpu_memory,
    "kv_offloading_size": _host_memory,
    "dtype": _dtype,
    "quantization": _quantization,
    "kv_cache_dtype": _kv_cache_dtype,
    "load_format": _load_format,
    "enforce_eager": _eager,
    "enable_chunked_prefill": _chunked,
    "tool_call_parser": partial(_parser, "tool_parser"),
    "reasoning_parser": partial(_parser, "reasoning_parser"),
    "max_logprobs": _max_logprobs,
    "limit_mm_per_prompt": _images,
    "allowed_media_domains": _hosts,
    "pooler_config": _pooling,
    "runner": _runner,
    "task": _runner,
    "speculative_config": _speculative,
    "lora_modules": _lora_modules,
}
"""Arguments that are taken along."""
_TOGETHER = ("enable_lora", "max_loras", "generation_config", "override_generation_config")
"""Arguments that are read together, by _settle_adapters and _settle_sampling."""


# --- what depends on several ------------------------------------------------------------------------------------------


def _settle_adapters(taking: Taking, kwargs: Mapping[str, Any]) -> None:
    """vLLM holds `max_loras` adapters, one by default, if `enable_lora` is set."""
    if kwargs.get("enable_lora"):
        taking.put("engine.max_loras", kwargs.get("max_loras", 1))
        return
    for name in ("max_loras", "max_lora_rank", "lora_modules"):
        if name in kwargs:
            taking.leave_out(f"{PATH}.{name}", kwargs[name], "it has no effect without enable_lora")
    for setting in ("lora_adapters", "engine.max_lora_rank"):
        if taking.get(setting) is not None:
            taking.drop(setting)


def _settle_sampling(taking: Taking, kwargs: Mapping[str, Any]) -> None:
    """Requests without values of their own get the model's, unless `generation_config` is vllm; those that override it
    stand over either."""
    source = kwargs.get("generation_config", "auto")
    if source != "vllm":
        taking.put("default_sampling.source", "model")
    if source not in ("auto", "vllm"):
        text = "taken as auto, which reads the model's own file; name others in override_generation_config"
        taking.changed(f"{PATH}.generation_config", source, text)
    path = f"{PATH}.override_generation_config"
    for name, value in taking.mapping(path, kwargs.get("override_generation_config")).items():
        if name != "source" and name in SamplingSettings.model_fields:
            taking.put(f"default_sampling.{name}", value)
        else:
            taking.unsupported(f"{path}.{name}", value, "it has no default here: send it in requests")


def _settle_memory(taking: Taking) -> None:
    """A number of blocks wins over bytes, and either over a share of the GPU, as in vLLM."""
    named = {
        "num_gpu_blocks_override": "engine.num_kv_blocks",
        "kv_cache_memory_bytes": "engine.kv_cache_memory_gib",
        "gpu_memory_utilization": "engine.gpu_memory_utilization",
    }
    given = [name for name, setting in named.items() if taking.get(setting) is not None]
    for name in given[1:]:
        taking.leave_out(f"{PATH}.{name}", taking.get(named[name]), f"{given[0]} says how large the KV cache is")
        taking.drop(named[name])
    host = "engine.kv_tiers.host_memory_gib"
    uncached = "KV is kept only for the prefix cache" if taking.get("engine.enable_prefix_caching") is False else None
    divided = "lower tiers move the KV of one rank alone" if taking.num_ranks > 1 else None
    if (why := uncached or divided) and taking.get(host) is not None:
        taking.leave_out(f"{PATH}.kv_offloading_size", taking.get(host), why)
        taking.drop("engine.kv_tiers")


def _settle_step(taking: Taking, below: Mapping[str, Any]) -> None:
    """A step must have room for the tokens of all requests, drafts included, and one of a prompt."""
    seats, step = taking.get("engine.max_num_seqs"), taking.get("engine.max_num_batched_tokens")
    drafts = taking.get("engine.num_speculative_tokens") or 0
    default = EngineConfig()
    most_seats = below.get("max_num_seqs", default.max_num_seqs) if seats is None else seats
    size = below.get("max_num_batched_tokens", default.max_num_batched_tokens) if step is None else step
    if not all(isinstance(number, int) and number >= 0 for number in (most_seats, size, drafts)):
        return  # the settings themselves refuse it
    least = most_seats * (1 + drafts) + 1
    if size >= least:
        return
    if step is not None and seats is None and size // (2 + 2 * drafts):
        taking.put("engine.max_num_seqs", size // (2 + 2 * drafts))
        text = f"it also bounds max_num_seqs, which is not set: taken as {size // (2 + 2 * drafts)}"
        taking.changed(f"{PATH}.max_num_batched_tokens", step, text)
        return
    name, value = ("max_num_seqs", seats) if step is None else ("max_num_batched_tokens", step)
    size = least if step is not None else 2 * least
    taking.put("engine.max_num_batched_tokens", size)
    taking.changed(f"{PATH}.{name}", value, f"a step takes {size} tokens, so that prompts get room beside answers")
