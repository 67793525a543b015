"""Owns the engine's two frozen configs: what was asked, and what the machine resolved.
Never reads the environment or probes hardware; `engine.build` does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

DEFAULT_MODEL = "smollm2-135m-instruct"


class ConfigError(ValueError):
    """A setting is out of range or contradicts another. The message names field, rule and value."""


def setting(default: Any, description: str, **bounds: float) -> Any:
    """A documented field. Bounds (`ge`, `gt`, `le`, `lt`) are checked by `check_bounds`, and by pydantic in YAML."""
    return field(default=default, metadata={"description": description, **bounds})


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
}


def check_bounds(config: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value breaks the bounds in its metadata."""
    for spec in fields(config):
        value = getattr(config, spec.name)
        for key, (holds, sign) in _BOUNDS.items():
            if key in spec.metadata and value is not None and not holds(value, spec.metadata[key]):
                raise ConfigError(f"{spec.name} must be {sign} {spec.metadata[key]}, but it is {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """The scripted executor's behaviour: no weights, deterministic tokens."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    reply: str | None = setting(None, "Text that every request is answered with; unset gives a hash of the prefix.")
    step_delay_ms: float = setting(0.0, "How long a step takes.", ge=0)
    token_delay_ms: float = setting(0.0, "Added to a step for each token that it computes.", ge=0)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What was asked of one engine. Frozen; unknown keys are refused where it is read from YAML."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    executor: Literal["torch", "fake"] = setting(
        "torch", "`torch` runs the model; `fake` scripts tokens without weights, for tests and demos."
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "`auto` reads the checkpoint; `dummy` makes seeded random weights of its shape, for benchmarks."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "Weights and KV cache. `auto`: bfloat16 where the CPU multiplies it natively, else float32."
    )
    max_model_len: int | None = setting(
        None, "Longest prompt + answer, in tokens. Unset: what the checkpoint was trained for.", ge=1
    )
    block_size: int = setting(16, "Tokens in a KV block.", ge=1)
    kv_cache_memory_gib: float = setting(2.0, "Memory for the KV cache, in GiB.", gt=0)
    num_kv_blocks: int | None = setting(None, "KV blocks; overrides kv_cache_memory_gib.", ge=1)
    max_num_seqs: int = setting(64, "Most requests that run at a time.", ge=1)
    max_num_batched_tokens: int = setting(512, "Most tokens in a step, decode and prefill rows together.", ge=2)
    max_prefill_tokens: int | None = setting(
        None, "Most prefill tokens in a step. Unset: all that decode rows leave of max_num_batched_tokens.", ge=1
    )
    max_queued_requests: int = setting(1024, "Most requests waiting to be admitted; one more is refused.", ge=0)
    enable_prefix_caching: bool = setting(True, "Reuse the KV blocks of a prompt prefix that was computed before.")
    num_threads: int | None = setting(
        None, "Torch threads of this engine. Unset: the machine's cores shared among the engine replicas.", ge=1
    )
    fake: FakeConfig = field(default_factory=FakeConfig, metadata={"description": "Settings of the fake executor."})

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_num_batched_tokens < self.max_num_seqs + 1:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs + 1 "
                f"({self.max_num_seqs + 1}): decode rows would leave no room for prefill, which would starve."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the machine and the model made of an EngineConfig, and why."""

    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_queued_requests: int
    enable_prefix_caching: bool
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    attention_backend: str
    num_threads: int
    reasons: dict[str, str] = field(default_factory=dict)
    """Setting -> why it has its value, one sentence each; logged at start."""

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + answer that this engine can hold: the context, or the whole KV cache if that is smaller.
        The last token's KV is never written, so a cache of n slots holds n + 1 tokens."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size + 1)
