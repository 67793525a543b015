"""Owns an engine's settings as types, and reads them as the server reads its config.
Never holds a default or a limit: those are the server's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from engine.config import (
    ConfigError,
    EngineConfig,
    FakeConfig,
    KvTiersConfig,
    SchedulerConfig,
    SpeculativeConfig,
    Targets,
)

if TYPE_CHECKING:
    from serve_app.settings.application import AppSettings

Section = Mapping[str, Any]
"""Settings by their names below `engine` in a config."""


class EngineSettings(TypedDict, total=False):
    """The settings below `engine` in a server's config, and at the end those of the model beside it.
    docs/reference/settings.md says what each means, its default, and its limits."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    kv_cache_memory_gib: float | None
    gpu_memory_utilization: float | None
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    quantize: Literal["auto", "none", "int8", "stored"]
    activations: Literal["auto", "int8", "fp8"]
    kv_cache_dtype: Literal["auto", "int8", "fp8_e4m3"]
    kernels: Literal["auto", "native", "torch_cpu", "reference"]
    attention: Literal["auto", "vllm_flash_attn", "triton", "torch"]
    enable_prefix_caching: bool
    max_queued_requests: int
    max_loras: int
    max_lora_rank: int
    num_threads: int | None
    tensor_parallel_size: int
    expert_parallel_size: int
    executor: Literal["torch", "fake"]
    load_format: Literal["auto", "dummy"]
    block_size: int
    num_kv_blocks: int | None
    max_prefill_tokens: int | None
    max_encoder_tokens: int
    encoder_cache_memory_gib: float
    overlap: bool
    num_speculative_tokens: int | None
    max_grammar_bytes: int
    grammar_timeout_s: float
    grammar_mask_timeout_s: float
    grammar_mask_average_s: float
    stall_timeout_s: float
    cuda_graphs: Literal["auto", "none", "decode", "all"]
    cuda_graph_decode_rows: Sequence[int] | None
    cuda_graph_mixed_tokens: Sequence[int] | None
    cuda_graph_mixed_rows: Sequence[int] | None
    batch_invariant: bool
    step_trace: bool
    targets: Targets | Section
    speculative: SpeculativeConfig | Section
    kv_tiers: KvTiersConfig | Section
    scheduler: SchedulerConfig | Section
    fake: FakeConfig | Section

    tool_parser: str
    reasoning_parser: str
    pooling: Literal["none", "mean", "last"]
    default_sampling: Section
    lora_adapters: Mapping[str, str]
    images: Section


OF_THE_MODEL = ("tool_parser", "reasoning_parser", "pooling", "default_sampling", "lora_adapters", "images")
"""Settings that stand beside `engine` in a config."""


def read_settings(model: str, given: Mapping[str, Any]) -> AppSettings:
    """Check the settings of an engine that serves `model`.

    Raises:
        ConfigError: a setting is unknown, or its value is; the message has a line for each.
    """
    known = [*(spec.name for spec in fields(EngineConfig)), *OF_THE_MODEL]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError("\n".join(_unknown("engine", name) for name in unknown))
    from pydantic import ValidationError

    from serve_app.settings.application import AppSettings
    from serve_app.settings.ranks import ranks_in

    beside = {name: given[name] for name in OF_THE_MODEL if name in given}
    engine = {name: value for name, value in given.items() if name not in beside}
    gpus = ranks_in(engine) if engine.get("device") == "cuda" else 0
    try:
        return AppSettings.model_validate({"model": model, "engine": engine, "engine_num_gpus": gpus, **beside})
    except ValidationError as error:
        raise ConfigError("\n".join(map(_reason, error.errors(include_url=False)))) from None


def _unknown(*place: str | int) -> str:
    from serve_app.settings.misspelt import meant

    likely = meant(place) or ""
    name = likely.removeprefix("args.").removeprefix("engine.")
    is_ours = name.partition(".")[0] in EngineSettings.__annotations__  # of an application, a config has others besides
    is_below = bool(name) and len(place) > 1 + (place[0] == "engine") and name == likely
    return f"unknown setting {_name(place)}" + (f": did you mean {name}?" if is_ours or is_below else "")


def _name(place: Sequence[str | int]) -> str:
    """Return the path of a setting as the library has it, where those below `engine` stand at the top."""
    return ".".join(str(part) for part in place if part != "engine")


def _reason(detail: Any) -> str:
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown(*detail["loc"])
    place = _name(detail["loc"])
    text = detail["msg"].removeprefix("Value error, ").replace("engine.", "")
    return f"{place}: {text} (given: {detail['input']!r})" if place else text
