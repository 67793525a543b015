"""Owns the engine's two frozen configs: the settings as written, and as resolved for the machine and the model. Long,
because each setting has its description. Never reads the environment or probes hardware; `engine.build.resolve` and
`engine.execution.device` do."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, wraps
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from engine.features import RULES, Facts, Rule, find_conflict, turned_on
from engine.multimodal_inputs import InputKind
from engine.presets import PRESETS, over_preset

DEFAULT_MODEL = "smollm2-135m-instruct"
MOST_DRAFTS = 4
"""Default for a decode row: JSON's fixed parts are rarely longer, and a row of five tokens takes little longer than a
row of one."""

FREE_TOKENS_ON_CPU, FREE_TOKENS_OF_INT8, FREE_TOKENS_ON_GPU = 8, 4, 128
"""Defaults of SpeculativeConfig.free_tokens. The GPU's is a cautious guess and not measured."""


class ConfigError(ValueError):
    """A setting is out of range or contradicts another. The message names field, rule and value."""


DAY_MS = 24 * 60 * 60 * 1000


def setting(default: Any, description: str, *, expert: bool = False, **bounds: float) -> Any:
    """A documented field. Bounds (`ge`, `gt`, `le`, `lt`) are checked by `check_bounds`, and by pydantic in YAML.

    `expert` marks a setting that few users need; the reference lists it after the others.
    """
    return field(default=default, metadata={"description": description, "expert": expert, **bounds})


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
}


def check_bounds(config: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value is infinite, breaks the bounds in its metadata,
    or is not among the choices in its type."""
    choices = choices_of(config.__class__)
    for spec in fields(config):
        value = getattr(config, spec.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{spec.name} must be a finite number, but it is {value}.")
        for key, (holds, sign) in _BOUNDS.items():
            if key in spec.metadata and value is not None and not holds(value, spec.metadata[key]):
                raise ConfigError(f"{spec.name} must be {sign} {spec.metadata[key]}, but it is {value}.")
        if spec.name in choices and value not in choices[spec.name]:
            known = ", ".join(str(choice) for choice in choices[spec.name] if choice is not None)
            raise ConfigError(f"{spec.name} must be one of {known}, but it is {value}.")


@cache
def choices_of(config: type) -> Mapping[str, tuple[Any, ...]]:
    """Return the choices of each field of a dataclass that takes one of a few values; they include None if it may be
    unset."""
    hints = get_type_hints(config)
    found = {spec.name: _choices(hints[spec.name]) for spec in fields(config)}
    return {name: choices for name, choices in found.items() if choices}


def _choices(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [_choices(part) for part in get_args(hint) if part is not type(None)]
    return (*parts[0], None) if len(parts) == 1 and parts[0] else ()


_Config = TypeVar("_Config")


def _with_presets(config: type[_Config]) -> type[_Config]:
    """Let a config made in Python take settings that are not written from its preset, and let a refusal name them.

    This must happen before the config is made, since afterwards a default looks like a written setting. For YAML,
    `__get_pydantic_core_schema__` does the same.
    """
    init, check = config.__init__, config.__post_init__  # type: ignore[attr-defined]

    @wraps(init)
    def with_preset(self: Any, **written: Any) -> None:
        init(self, **over_preset(written))

    def checked(self: Any) -> None:
        try:
            check(self)
        except ConfigError as error:
            words = set(re.findall(r"\w+", str(error)))
            settings = [f"{name} {value}" for name, value in self.from_preset.items() if name in words]
            if not settings:
                raise
            raise ConfigError(f"{error} The preset {self.preset} sets {', '.join(settings)}.") from None

    config.__init__ = with_preset  # type: ignore[method-assign]
    config.__post_init__ = checked  # type: ignore[attr-defined]
    return config


def refuse_conflicts(on: Facts, rules: Iterable[Rule] = RULES) -> None:
    """Raise ConfigError for the first rule that the features that are on break."""
    if conflict := find_conflict(on, rules):
        raise ConfigError(conflict.text(on))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """Settings of the scripted executor, which has no weights and returns deterministic tokens."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    reply: str | None = setting(
        None, "Text that answers every request. Unset: tokens derived from a hash of the preceding ones."
    )
    step_delay_ms: float = setting(0.0, "How long a step takes, in milliseconds.", ge=0)
    token_delay_ms: float = setting(0.0, "Added to a step for each token that it computes, in milliseconds.", ge=0)
    recurrent_state: bool = setting(False, "Act as a hybrid model, which has recurrent state besides the KV cache.")
    images: bool = setting(False, "Act as a model that takes images.")

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of drafts: guessed tokens that are verified together in one step."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    method: Literal["auto", "none", "ngram", "suffix", "draft_model"] = setting(
        "auto",
        "Where drafts come from, besides those that a grammar forces. `ngram`: look for the request's newest tokens "
        "earlier in its prompt and answer, and draft what followed their latest occurrence. `suffix`: draft what "
        "followed their longest match. `draft_model`: a smaller model proposes them. `none`: no others. Answers are "
        "the same with each. `auto`: `suffix` with the native kernels, where answers are equal to the bit; otherwise "
        "`none`.",
    )
    model: str | None = setting(
        None,
        "Which model drafts, for `draft_model`: a directory, a hub id or a .gguf file. It must have the main model's "
        "vocabulary. Its KV cache shares kv_cache_memory_gib. Only on the CPU.",
    )
    model_cost: float | None = setting(
        None,
        "`draft_model` with `adaptive`: the time of its forward pass of one token, as a multiple of the main model's. "
        "Unset: the ratio of the bytes of weights that the two read.",
        expert=True,
        gt=0,
    )
    min_match: int = setting(
        2,
        "Minimum number of tokens that must match before anything is drafted. Raise it for fewer and better drafts.",
        expert=True,
        ge=1,
        le=16,
    )
    max_match: int = setting(
        4, "`ngram`: length of the match to look for first; shorter ones follow.", expert=True, ge=1, le=16
    )
    num_tokens: int = setting(
        8,
        "Maximum number of tokens drafted for a row. `num_speculative_tokens` limits the drafts of all rows together.",
        expert=True,
        ge=1,
    )
    adaptive: bool = setting(
        True,
        "Draft only as many tokens as are expected to pay, judged by how often the request's drafts were right and by "
        "how many rows share the step. Under load that is none. `false`: always num_tokens, for measurements.",
        expert=True,
    )
    free_tokens: int | None = setting(
        None,
        "`adaptive`: tokens in a step up to which one more costs little time, because the weights are read anyway. "
        "Unset: 8 on a CPU, 4 where weights have 8 bits, 128 on a GPU. Not beside `targets`, for which "
        "steps are measured.",
        expert=True,
        ge=1,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.method == "draft_model" and not self.model:
            raise ConfigError("speculative.method is draft_model, but speculative.model does not name one.")
        refuse_conflicts(turned_on(self, prefix="speculative."))
        if self.method == "ngram" and self.max_match < self.min_match:
            raise ConfigError(f"speculative.min_match ({self.min_match}) must not exceed max_match ({self.max_match}).")


@_with_presets
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are composed, how memory is reserved, and which request loses it when it runs out. Settings that few
    users need are marked `expert`, and come after the others."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    preset: Literal["openinfer", "mminf", "openinfer_echo", "atom", "fastdeploy"] | None = setting(
        None,
        "A public design whose settings replace the defaults below, for comparisons; engine/DESIGNS.md lists what each "
        "sets. A setting that is written beside it wins. Unset: chunkserve's own schedule.",
    )
    reserve_mode: Literal["full", "learned", "ratio", "prompt"] = setting(
        "learned",
        "How much memory must be free, besides the prompt's, to admit a request. `full`: enough for its longest "
        "possible answer, so that nothing is ever preempted and fewer requests run. `learned`: what all answers are "
        "expected to need at their peak, judged by the lengths of earlier answers. `ratio`: a share of the tokens that "
        "all answers may still take; the share falls until memory runs out. `prompt`: nothing more.",
    )
    preempt_policy: Literal["none", "lifo", "retract", "offload"] = setting(
        "retract",
        "Which request gives up its memory when decoding runs out of it. `lifo`: the latest arrival. `retract`: the "
        "one that loses least: the shortest answer, and among equals the longest prompt. `offload`: the latest "
        "arrival, whose KV always goes to the host tier; with the others it goes there if moving it there and back is "
        "predicted to take less time than computing it again. `none`: only with `reserve_mode: full`, which never runs "
        "out. The oldest request is never chosen.",
    )
    long_prefill_token_threshold: int = setting(
        0,
        "Maximum tokens of one prompt in a step. 0: no limit. Lower it so that short prompts need not wait for a long "
        "one: they use the rest of the step, even behind a long prompt that max_partial_prefills holds back.",
        ge=0,
    )
    priority_age_ms: float = setting(
        10_000.0,
        "A request that has waited this long, in milliseconds, goes before all priorities and tenant shares. A partly "
        "computed prompt that has not advanced for this long continues first. If every request waits longer than this, "
        "only the order of arrival counts, so raise it to keep priorities under overload.",
        ge=0,
        le=365 * DAY_MS,
    )
    state_snapshot_tokens: int = setting(
        0,
        "Hybrid models: number of tokens between snapshots of the recurrent state, which the prefix cache "
        "needs. A multiple of block_size. 0: no snapshots, and no prefix hits for such models.",
        ge=0,
    )
    batch_mode: Literal["mixed", "mixed_prefill_first", "prefill_first", "decode_first"] = setting(
        "mixed",
        "What a step carries. `mixed`: all decode rows, then prefill chunks. `mixed_prefill_first`: prefill chunks, "
        "then as many decode rows as the rest of max_num_batched_tokens has room for, those first that have waited "
        "longest; `decode_starve_ms` bounds the wait of each. `prefill_first`: prefill alone, while there is any; "
        "`decode_starve_ms` bounds the wait of decode rows. `decode_first`: decode rows alone, while there are any; "
        "`prefill_starve_ms` bounds the wait of prompts.",
        expert=True,
    )
    decode_starve_ms: float = setting(
        200.0,
        "Longest time without decode rows while requests decode, in milliseconds, if prefill has its own steps: "
        "`batch_mode: prefill_first`, `chunk_owner: engine`, `prompt_logprobs_step: dedicated`; and longest time that "
        "a decode row waits with `batch_mode: mixed_prefill_first`. A step that has begun is not cut short. Lower it "
        "for shorter gaps in streams.",
        expert=True,
        ge=0,
    )
    prefill_starve_ms: float = setting(
        2000.0,
        "`batch_mode: decode_first` and decode_finish_tokens: longest time that a prompt waits for its next chunk, in "
        "milliseconds.",
        expert=True,
        ge=0,
    )
    decode_finish_tokens: int = setting(
        0,
        "While a request has at most this many answer tokens left, steps carry no prefill. 0: off.",
        expert=True,
        ge=0,
    )
    requeue: Literal["arrival", "front", "back"] = setting(
        "arrival",
        "Where a preempted request waits. `arrival`: in the order of arrival. `front`: before all others. `back`: "
        "behind them.",
        expert=True,
    )
    reserve_margin: float = setting(
        0.5,
        "`reserve_mode: learned`: standard deviations of the expected memory that are kept free as a margin. Raise it "
        "for fewer preemptions, lower it to admit more.",
        expert=True,
        ge=0,
        le=8,
    )
    reserve_caution: float = setting(
        0.2,
        "`reserve_mode: learned`: standard deviations added to the margin by each step that preempts, up to 4 in all. "
        "300 steps without a preemption take one such addition back.",
        expert=True,
        ge=0,
        le=4,
    )
    reserve_prior: int = setting(
        256,
        "`reserve_mode: learned`: median answer length, in tokens, that is assumed before any answer was seen; at most "
        "a sixteenth of what the KV cache holds.",
        expert=True,
        ge=1,
    )
    reserve_window: int = setting(
        512,
        "`reserve_mode: learned`: number of answers after which what was learned of a tenant counts half as much. "
        "Lower it to follow changes faster.",
        expert=True,
        ge=8,
    )
    reserve_tenants: int = setting(
        64,
        "`reserve_mode: learned`: tenants whose answers are counted separately, the most recent ones. 0: none.",
        expert=True,
        ge=0,
    )
    ratio_init: float = setting(
        0.7, "`reserve_mode: ratio`: share of the remaining answers reserved at first.", expert=True, gt=0, le=1
    )
    ratio_min: float = setting(0.21, "`reserve_mode: ratio`: minimum of this share.", expert=True, gt=0, le=1)
    ratio_decay_steps: int = setting(
        600, "`reserve_mode: ratio`: steps in which the share falls from ratio_init to ratio_min.", expert=True, ge=1
    )
    ratio_decay_on: Literal["decode_only", "any_decode"] = setting(
        "any_decode",
        "`reserve_mode: ratio`: steps that lower the share. `decode_only`: those that decode without any prefill. "
        "`any_decode`: all that decode.",
        expert=True,
    )
    retract_steps: int = setting(
        20,
        "`reserve_mode: ratio`: tokens by which each running answer is expected to grow after a preemption.",
        expert=True,
        ge=0,
    )
    reserve_clip: int = setting(
        4096,
        "`reserve_mode: learned` and `ratio`: maximum answer tokens of one request that are counted.",
        expert=True,
        ge=1,
    )
    watermark_blocks: int = setting(
        1, "`reserve_mode: prompt`: KV blocks that must stay free when a request is admitted.", expert=True, ge=0
    )
    enable_chunked_prefill: bool = setting(
        True,
        "Compute a prompt in chunks over several steps if it does not fit into one. `false`: a prompt is computed "
        "whole in one step, or waits for one. Then a step must hold the longest prompt besides its decode rows: raise "
        "max_num_batched_tokens, or lower max_model_len.",
        expert=True,
    )
    max_partial_prefills: int = setting(
        1,
        "Maximum number of prompts of one priority that may be partly computed after a step. 0: as many as there are "
        "seats. Raise it to spread a step over several long prompts.",
        expert=True,
        ge=0,
    )
    long_prefill_defer_tokens: int = setting(
        0,
        "A partly computed prompt with at least this many tokens left steps aside for prompts with fewer: those that "
        "wait or are partly computed go first in each step, and it takes what they leave. long_prefill_defer_ms bounds "
        "this. 0: it goes first until it is computed. Lower it for earlier first tokens of short prompts behind it.",
        expert=True,
        ge=0,
    )
    long_prefill_defer_ms: float = setting(
        2000.0,
        "long_prefill_defer_tokens: longest time between two steps in which a long prompt goes before short ones, in "
        "milliseconds. Lower it for earlier first tokens of long prompts.",
        expert=True,
        ge=0,
    )
    chunk_halving_context: int | None = setting(
        None,
        "Context length, in tokens, at which a chunk has half as many tokens; at twice that it has a third. Attention "
        "to a long context takes time as well, so the last chunks of a long prompt then take as long as the first. 0: "
        "chunks never shrink. Unset: the context at which attention costs as much as the model's matrix products.",
        expert=True,
        ge=0,
    )
    chunk_align: int | None = setting(
        None,
        "A chunk that ends inside its prompt ends at a position that is a multiple of this many tokens. Unset: "
        "block_size, or 1 with `targets.tpot_ms`.",
        expert=True,
        ge=1,
    )
    chunk_boundary: Literal["shared", "request_local"] = setting(
        "shared",
        "Where chunks end. `shared`: wherever the step's budget ends. `request_local`: at positions that depend on the "
        "request alone, so that they are the same in any batch.",
        expert=True,
    )
    chunk_owner: Literal["scheduler", "engine"] = setting(
        "scheduler",
        "Who cuts a prompt that is longer than a step's prefill. `scheduler`: into chunks in several steps. `engine`: "
        "into several forward passes in one step of its own, for which decode rows wait; for offline use and "
        "comparisons.",
        expert=True,
    )
    atomic_policy: Literal["defer", "extend"] = setting(
        "defer",
        "What to do with a span that must not be cut and does not fit into the rest of max_prefill_tokens. `defer`: "
        "leave it to a later step. `extend`: let the chunk exceed that limit, within max_num_batched_tokens.",
        expert=True,
    )
    prompt_logprobs_step: Literal["mixed", "dedicated"] = setting(
        "mixed",
        "Steps that compute log-probabilities of prompt tokens. `mixed`: they carry decode rows, too. `dedicated`: "
        "they carry none, and decode_starve_ms bounds the wait.",
        expert=True,
    )
    prefill_fill_ratio: float = setting(
        0.0,
        "While requests decode, prefill waits until this share of max_prefill_tokens is queued, prefix hits included. "
        "coalesce_waiting_ms and coalesce_partial_ms bound the wait. 0: prefill never waits. Raise it for fewer, "
        "fuller prefill steps and later first tokens.",
        expert=True,
        ge=0,
        le=1,
    )
    coalesce_waiting_ms: float = setting(
        300.0,
        "prefill_fill_ratio: longest time that a new prompt is held back, in milliseconds.",
        expert=True,
        ge=0,
    )
    coalesce_partial_ms: float = setting(
        80.0,
        "prefill_fill_ratio: longest time that the next chunk of a partly computed prompt is held back, in "
        "milliseconds.",
        expert=True,
        ge=0,
    )
    answer_token_weight: float = setting(
        2.0,
        "How much an answer token counts against its tenant's share; a prompt token counts 1. With targets, predicted "
        "time counts instead.",
        expert=True,
        ge=0,
    )
    state_snapshots: int = setting(64, "Hybrid models: maximum number of snapshots.", expert=True, ge=1)
    admission_order: Literal["strict", "bypass"] = setting(
        "strict",
        "What happens behind a request for which memory does not suffice yet. `strict`: those behind it wait. "
        "`bypass`: those that fit may overtake it. With either, prompts that a step takes whole may overtake one that "
        "cannot use the rest of the step.",
        expert=True,
    )
    max_overtakes: int = setting(
        16, "`admission_order: bypass`: how often a request may be overtaken.", expert=True, ge=1
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Mapping[str, Any]:
        """Return the schema of a plain dataclass that takes settings that are not written from the preset."""

        def read(written: Any) -> Any:
            return over_preset(written) if isinstance(written, dict) else written

        function = {"type": "no-info", "function": read}
        return {"type": "function-before", "function": function, "schema": handler(source)}

    @property
    def from_preset(self) -> dict[str, Any]:
        """The settings that have the preset's value; empty without a preset."""
        preset = PRESETS.get(self.preset, {}) if isinstance(self.preset, str) else {}
        return {name: value for name, value in preset.items() if getattr(self, name) == value}

    @property
    def why(self) -> dict[str, str]:
        """The preset in a sentence, for the reasons of a resolved config; empty without a preset."""
        if self.preset is None:
            return {}
        kept = self.from_preset
        others = [f"{name} {getattr(self, name)}" for name in PRESETS[self.preset] if name not in kept]
        return {"scheduler": f"preset {self.preset}" + (f", with {', '.join(others)} instead" if others else "")}

    def __post_init__(self) -> None:
        check_bounds(self)
        refuse_conflicts(turned_on(self, prefix="scheduler."))
        if self.ratio_min > self.ratio_init:
            raise ConfigError(f"ratio_min ({self.ratio_min}) must not exceed ratio_init ({self.ratio_init}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Service-level targets, by which steps are composed and prompts ordered. Times are predicted by a model of this
    machine that is measured at the first start and kept; docs/explanation/scheduling-by-time.md has more."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    tpot_ms: float | None = setting(
        None,
        "Longest time between two tokens of a stream, in milliseconds. A step takes as much prefill as fits into it "
        "beside the decode rows; without decode rows it takes up to max_num_batched_tokens. Lower it for shorter gaps "
        "in streams; raise it for earlier first tokens of long prompts and more throughput. Unset: the number of "
        "tokens alone limits a step.",
        gt=0,
        le=DAY_MS,
    )
    ttft_ms: float | None = setting(
        None,
        "Longest time from a request's arrival at the engine to its first token, in milliseconds. Within a priority "
        "and a tenant, short prompts go before long ones that arrived a little earlier, and those that can no longer "
        "be in time go after those that can. Unset: prompts go in the order of arrival.",
        gt=0,
        le=DAY_MS,
    )

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def tpot_s(self) -> float:
        """The target between two tokens in seconds; infinite if there is none."""
        return math.inf if self.tpot_ms is None else self.tpot_ms / 1000

    @property
    def ttft_s(self) -> float:
        """The target for the first token in seconds; infinite if there is none."""
        return math.inf if self.ttft_ms is None else self.ttft_ms / 1000

    @property
    def any(self) -> bool:
        return self.tpot_ms is not None or self.ttft_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTiersConfig:
    """Where the KV of prefixes is kept besides the KV cache, so that it need not be computed again."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    host_memory_gib: float = setting(
        0.0,
        "Memory of the machine, in GiB, for KV that the KV cache has no room for. Each engine has its own. 0: none.",
        ge=0,
    )
    disk_path: str | None = setting(
        None,
        "Directory for KV that outlives memory and restarts. Engines of one machine may share it; it is made with mode "
        "0700, and files of another model or another version are not read. Unset: none.",
    )
    disk_gib: float = setting(10.0, "Most that all files in disk_path take together, in GiB.", gt=0)
    disk_key_file: str | None = setting(
        None,
        "File with the key that encrypts files in disk_path (AES-256-GCM): 32 bytes, or 64 hexadecimal digits. Unset: "
        "they are not encrypted, and whoever may read them may learn about prompts.",
    )
    dtype: Literal["auto", "int8", "fp8_e4m3"] = setting(
        "auto",
        "In how many bits both tiers keep KV, on a CPU. `auto`: as the KV cache has it, to the bit. `int8` and "
        "`fp8_e4m3`: one byte a number, with a scale for each token and head, so that they hold about twice as many "
        "tokens in bfloat16 and four times as many in float32. What comes back is rounded, so an answer may differ "
        "from the computed one.",
    )
    retention: Literal["value", "lru"] = setting(
        "value",
        "What leaves the host tier first. `value`: turns of a conversation that a later turn replaced, then prompts "
        "that came once, then what was not used for longest; a tenant above its share before others. `lru`: what was "
        "not used for longest.",
        expert=True,
    )
    load_timeout_s: float = setting(
        5.0,
        "How long a request waits for KV from a lower tier that does not answer, before its prompt is computed "
        "instead, in seconds.",
        expert=True,
        gt=0,
    )

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def any(self) -> bool:
        return self.host_memory_gib > 0 or self.disk_path is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one engine as written. Frozen; unknown keys in YAML are refused."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_num_batched_tokens: int = setting(
        512,
        "Maximum tokens in a step, decode and prefill rows together. It bounds how long a stream pauses while another "
        "request's prompt is computed. Lower it for shorter gaps in streams; raise it for earlier first tokens of long "
        "prompts and more throughput.",
        ge=2,
    )
    max_num_seqs: int = setting(
        64,
        "Maximum number of requests that run at a time. Raise it for more throughput; each stream then gets its tokens "
        "more slowly.",
        ge=1,
    )
    max_model_len: int | None = setting(
        None,
        "Longest prompt and answer together, in tokens; a longer request is refused. Unset: what the checkpoint was "
        "trained for.",
        ge=1,
    )
    kv_cache_memory_gib: float | None = setting(
        None,
        "Memory for the KV cache, in GiB. It bounds how many tokens all running requests hold together. More than the "
        "free memory is refused. Unset: on the CPU, 80 % of what weights leave of the engine's share of the free "
        "memory, and no more than max_num_seqs requests of max_model_len tokens can use; on a GPU, what "
        "gpu_memory_utilization leaves. See docs/explanation/memory.md.",
        gt=0,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of the GPU's memory that the engine takes. The KV cache gets what weights, the largest step and "
        "captured steps leave. Unset: 0.9.",
        gt=0,
        le=1,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Where steps run: on the `cpu`, or on the GPU (`cuda`). `auto`: on the GPU that the replica has "
        "(engine_num_gpus), otherwise on the CPU.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Type of activations, and of weights and KV cache unless these have fewer bits. `auto`: `bfloat16` where the "
        "device multiplies it natively, otherwise `float32`. `float16`: only on a GPU.",
    )
    quantize: Literal["auto", "none", "int8", "stored"] = setting(
        "auto",
        "In how many bits weight matrices are held. `auto`: `stored` on a CPU where the native kernels compute with "
        "the checkpoint's bits and no matrix unit (AMX) multiplies bfloat16 faster, otherwise `none`; the log says "
        "why. `none`: in the type of `dtype`; of a packed checkpoint, the native kernels still keep integers of 8 "
        "bits with a scale and no zero point for each output, and a GPU with Triton all that its kernels read. "
        "`stored`: in a checkpoint's own 4 to 8 bits, without rounding, and only with the native kernels: a GGUF "
        "file's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K, embedding and LM head included, and integers and "
        "FP8 of AWQ, GPTQ, compressed-tensors and fp8 in groups of a multiple of 32 inputs, experts included. `int8`: "
        "rounded to one byte for each weight and a scale for each output, so that a token reads half as much memory; "
        "with the native kernels, or on a GPU with Triton, where packed weights that stay packed are left so. "
        "For the loss of accuracy see docs/how-to/quantised-models.md.",
    )
    activations: Literal["auto", "int8", "fp8"] = setting(
        "auto",
        "Type of the activations that matrices with packed weights are multiplied by. `auto`: the type of `dtype`. "
        "`int8`, on a CPU: rounded to 8 bits in blocks of 32 of a token, with a scale for each block, so that prompts "
        "and batches take less time, and answers are less accurate. It needs weights of 4 to 8 bits (`quantize` "
        "`auto`, `stored` or `int8`), the native kernels, and a processor with AVX-512 VNNI or AVX-VNNI. `fp8` (e4m3), "
        "on a GPU with Triton of compute capability 8.9 or later: where a checkpoint's matrix stays in fp8 and a step "
        "has more than 64 tokens; each token has a scale of its own, unless the checkpoint has one; experts are "
        "multiplied as without it. With either, so are matrices in the type of `dtype`. "
        "docs/how-to/quantised-models.md says what each costs.",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8_e4m3"] = setting(
        "auto",
        "Type of the KV cache. `int8` and `fp8_e4m3`: one byte for each number, and a scale for each token and KV "
        "head, so that about twice as many tokens fit as in bfloat16. On a GPU, both need Triton's attention. `auto`: "
        "the type of `dtype`. For the loss of accuracy see docs/how-to/quantised-models.md.",
    )
    kernels: Literal["auto", "native", "torch_cpu", "reference"] = setting(
        "auto",
        "What computes a step on a CPU. `native`: C++ compiled for this processor at the first start, or else an "
        "installed wheel's for its level. `torch_cpu`: "
        "torch's operators. `reference`: slow, the definition of correct. `auto`: native where there is a compiler and "
        "the model's shape is supported, otherwise torch_cpu; the log says why.",
    )
    attention: Literal["auto", "vllm_flash_attn", "triton", "torch"] = setting(
        "auto",
        "Attention on a GPU. `vllm_flash_attn`: the first of FlashAttention-3 (on Hopper), vllm_flash_attn and "
        "flash_attn that can be imported. `triton`: chunkserve's own kernels. `torch`: slow, the definition of "
        "correct. `auto`: the first of these that runs; the log says why.",
    )
    enable_prefix_caching: bool = setting(
        True, "Reuse the KV blocks of a prompt's beginning if they were computed for an earlier request."
    )
    max_queued_requests: int = setting(
        1024, "Maximum number of requests that wait in the engine to be admitted; one more is refused.", ge=0
    )
    max_loras: int = setting(
        0,
        "LoRA adapters that an engine holds in memory at a time. The least recently used one makes room, unless "
        "running requests use it. 0: no adapters are served. On a GPU the memory of all of them, at max_lora_rank, is "
        "reserved at the start.",
        ge=0,
    )
    max_lora_rank: int = setting(16, "Maximum rank of an adapter; one with a higher rank is refused.", ge=1)
    num_threads: int | None = setting(
        None,
        "Threads that compute a step, at most the machine's cores. Unset: the cores, or a container's share of them, "
        "divided among the engine replicas.",
        ge=1,
    )
    tensor_parallel_size: int = setting(
        1,
        "Ranks that compute the model together, each in a process of its own with a part of every layer's weights and "
        "of the KV cache, so that a model may be larger than one rank's memory. Each has a GPU of its own; on the CPU, "
        "they divide num_threads. The leader, rank 0, plans and samples; all ranks add up their parts of each layer's "
        "output twice.",
        ge=1,
    )
    expert_parallel_size: int = setting(
        1,
        "Ranks that have a mixture's experts between them, each in a process of its own with its own requests and KV "
        "cache: data parallel in lockstep (vLLM's data_parallel_size with enable_expert_parallel, SGLang's ep_size). "
        "All else of the model is whole on each rank. In each layer with experts, rows go to their experts' ranks and "
        "back, so ranks make their steps together. The leader, rank 0, gives each request to the rank with the least "
        "to compute for it, cached prefixes counted. Limits such as max_num_seqs are each rank's. An engine on the CPU "
        "divides num_threads among them.",
        ge=1,
        le=64,
    )
    executor: Literal["torch", "fake"] = setting(
        "torch",
        "What runs a step. `torch`: the model. `fake`: scripted tokens without weights, for tests and demos.",
        expert=True,
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto",
        "Where weights come from. `auto`: the checkpoint. `dummy`: seeded random weights of its shape, for benchmarks.",
        expert=True,
    )
    block_size: int = setting(16, "Tokens in a KV block.", expert=True, ge=1)
    num_kv_blocks: int | None = setting(
        None, "Number of KV blocks. It overrides kv_cache_memory_gib.", expert=True, ge=1
    )
    max_prefill_tokens: int | None = setting(
        None,
        "Maximum prefill tokens in a step. Unset: all that decode rows leave of max_num_batched_tokens.",
        expert=True,
        ge=1,
    )
    max_encoder_tokens: int = setting(
        512,
        "Maximum prompt tokens of images that are encoded before a step's rows are computed. A single image with more "
        "tokens is encoded whole, and alone.",
        expert=True,
        ge=1,
    )
    encoder_cache_memory_gib: float = setting(
        0.25,
        "Memory for encoded images, in GiB, so that a repeated image is not encoded again. Images of running requests "
        "are always kept.",
        expert=True,
        gt=0,
    )
    overlap: bool = setting(
        False,
        "Plan and launch a step before the previous one is read back, so that the device never waits for Python. An "
        "answer with drafts is left out of the next step, until those are verified: it gets drafts only where they are "
        "expected to win more than that. A draft model is excluded.",
        expert=True,
    )
    num_speculative_tokens: int | None = setting(
        None,
        "Maximum draft tokens of a decode row, besides its newest token, if a grammar forces what follows; they are "
        "verified together. Times max_num_seqs, it is also the maximum number of draft tokens in a step. Unset: 4, and "
        "fewer if decode rows would take more than half of max_num_batched_tokens; 0 with overlap unless drafts are "
        "looked up, and on a GPU with recurrent state. With overlap, a token in flight is waited for if 4 or more are "
        "forced beside other answers.",
        expert=True,
        ge=0,
    )
    max_grammar_bytes: int = setting(2**20, "Longest grammar of an answer, in bytes.", expert=True, ge=1)
    grammar_timeout_s: float = setting(
        2.0,
        "How long a request waits for its grammar to be compiled before it is refused, in seconds.",
        expert=True,
        gt=0,
    )
    grammar_mask_timeout_s: float = setting(
        0.1,
        "Most processor time that it may take to find which tokens a grammar allows next, in seconds. No step waits "
        "longer for it; an answer whose grammar takes more fails, and with it others that have the same grammar.",
        expert=True,
        gt=0,
    )
    grammar_mask_average_s: float = setting(
        0.01,
        "Most processor time a token, on average, that it may take to follow an answer's grammar, in seconds. An "
        "answer that is above it by ten times `grammar_mask_timeout_s` fails.",
        expert=True,
        gt=0,
    )
    stall_timeout_s: float = setting(
        30.0,
        "An engine is unhealthy, and Serve restarts it, if a step has taken this many seconds and ten times as long as "
        "the slowest recent step.",
        expert=True,
        gt=0,
    )
    cuda_graphs: Literal["auto", "none", "decode", "all"] = setting(
        "auto",
        "Steps that a GPU replays as captured graphs. `none`: no steps. `decode`: those of decode rows alone. `all`: "
        "those with prefill, too. `auto`: all, where the attention can be captured.",
        expert=True,
    )
    cuda_graph_decode_rows: tuple[int, ...] | None = setting(
        None,
        "Numbers of rows for which decode steps are captured, up to max_num_seqs; a step is padded to the next of "
        "them. Unset: chosen by the engine.",
        expert=True,
    )
    cuda_graph_mixed_tokens: tuple[int, ...] | None = setting(
        None,
        "Numbers of tokens for which steps with prefill are captured, up to max_num_batched_tokens. Unset: chosen by "
        "the engine, up to the size at which the GPU's work hides the launches of a step, as measured at the start.",
        expert=True,
    )
    cuda_graph_mixed_rows: tuple[int, ...] | None = setting(
        None,
        "Numbers of rows for which steps with prefill are captured, up to max_num_seqs. Unset: chosen by the engine.",
        expert=True,
    )
    batch_invariant: bool = setting(
        False,
        "Refuse to start unless a request's tokens and log-probabilities are the same, to the bit, alone and in any "
        "batch, however its prompt is cut, and after a migration. On a CPU, the native kernels always guarantee that, "
        "at no cost. On a GPU, it takes kernels of its own, and the start compares the bits of several steps.",
        expert=True,
    )
    step_trace: bool = setting(
        False, "Log a line for every step: its rows, its tokens, and how long it took.", expert=True
    )
    targets: Targets = field(
        default_factory=Targets,
        metadata={"description": "Targets in time: the longest gap of a stream, and the time to a first token."},
    )
    speculative: SpeculativeConfig = field(
        default_factory=SpeculativeConfig,
        metadata={"description": "Drafts, besides those that grammars force."},
    )
    kv_tiers: KvTiersConfig = field(
        default_factory=KvTiersConfig,
        metadata={"description": "Memory and disk that keep KV which the KV cache has no room for."},
    )
    scheduler: SchedulerConfig = field(
        default_factory=SchedulerConfig, metadata={"description": "How steps are composed."}
    )
    fake: FakeConfig = field(default_factory=FakeConfig, metadata={"description": "Settings of the fake executor."})

    def __post_init__(self) -> None:
        check_bounds(self)
        least = self.max_num_seqs * (1 + (self.num_speculative_tokens or 0)) + 1
        if self.max_num_batched_tokens < least:
            a_row = f" * (1 + num_speculative_tokens {self.num_speculative_tokens})" * bool(self.num_speculative_tokens)
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs{a_row} + 1 "
                f"({least}): decode rows would leave no room for prefill, which would starve."
            )
        refuse_conflicts(turned_on(self))
        if self.scheduler.state_snapshot_tokens % self.block_size:
            raise ConfigError(
                f"state_snapshot_tokens ({self.scheduler.state_snapshot_tokens}) must be a multiple of block_size "
                f"({self.block_size}): a prefix hit needs KV and state that end at the same position."
            )
        if self.max_model_len is not None:
            _check_whole_prompts(self, self.max_model_len, least - 1)

    @property
    def num_seats(self) -> int:
        """How many requests the engine runs at once, those of all its ranks together."""
        return self.max_num_seqs * self.expert_parallel_size

    @property
    def queue_room(self) -> int:
        """How many requests wait in the engine at most, for all its ranks together."""
        return self.max_queued_requests * self.expert_parallel_size

    @property
    def stored(self) -> bool:
        """Whether matrices are kept in their checkpoint's bits. With `quantize: auto` only the start can tell."""
        return self.quantize == "stored"

    @property
    def rounds_activations(self) -> bool:
        """Whether the native kernels round activations to 8 bits."""
        return self.activations == "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig as resolved for the machine and the model, with the reasons."""

    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_queued_requests: int
    enable_prefix_caching: bool
    scheduler: SchedulerConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    step_trace: bool
    overlap: bool
    num_speculative_tokens: int
    max_grammar_bytes: int
    grammar_timeout_s: float
    grammar_mask_timeout_s: float
    grammar_mask_average_s: float
    dtype: str
    device: str
    """`cpu`, or the GPU's name."""
    kernels: str
    """On a GPU, the attention."""
    num_threads: int
    stall_timeout_s: float
    speculative: SpeculativeConfig = SpeculativeConfig(method="none")
    """Resolved: the method is not `auto`, and free_tokens and a draft model's model_cost are set."""
    kv_cache_dtype: str = "auto"
    """`auto` means that of `dtype`."""
    quantize: str = "none"
    """Resolved: not `auto`."""
    recurrent_state: bool = False
    """Whether the model has state besides KV: then requests hold state slots, and prefix hits need snapshots."""
    drafting_limit: int | None = None
    """Maximum tokens of a step's decode rows together, if any carries drafts; None means what all seats could carry."""
    inputs: tuple[InputKind, ...] = ()
    """The kinds of inputs that the model takes besides text."""
    max_encoder_tokens: int = 512
    encoder_cache_tokens: int = 0
    """Tokens of inputs whose embeddings fit into encoder_cache_memory_gib."""
    max_loras: int = 0
    targets: Targets = Targets()
    kv_tiers: KvTiersConfig = KvTiersConfig()
    kv_block_bytes: int = 0
    """Bytes of a KV block without a draft model's; 0 if the executor stores no KV."""
    tier_block_bytes: int = 0
    """Bytes of the same in a tier; 0 likewise."""
    expert_parallel_size: int = 1
    """How many ranks have requests, seats and KV of their own; the numbers here are of one of them."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Setting -> why it has its value, one sentence each; logged at start."""
    headless: bool = False
    """Whether the model has no LM head: then prompts can be pooled, and nothing is answered."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        drafts: bool = False,
        unseen_drafts: bool = False,
        eight_bits: bool = False,
        model_cost: float | None = None,
        **resolved: Any,
    ) -> ResolvedConfig:
        """Combine the written settings that need no resolving with the resolved values. `drafts`: the executor drafts
        by default; `unseen_drafts`: and its answers are the same to the bit with drafts. `eight_bits`: the kernels'
        weights have 8 bits. `model_cost`: the draft model's, unless it is written.

        Raises:
            ConfigError: drafts are asked for, but a step has no room for any; or prompts are not computed in chunks,
                but a step has no room for the longest.
        """
        num_drafts = _num_speculative_tokens(config, drafts)
        resolved["reasons"] = resolved.get("reasons", {}) | config.scheduler.why
        made = cls(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_tokens=config.max_prefill_tokens or config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            enable_prefix_caching=config.enable_prefix_caching,
            max_encoder_tokens=config.max_encoder_tokens,
            max_loras=config.max_loras,
            expert_parallel_size=config.expert_parallel_size,
            targets=config.targets,
            kv_tiers=config.kv_tiers,
            kv_cache_dtype=config.kv_cache_dtype,
            quantize="none" if config.quantize == "auto" else config.quantize,
            scheduler=resolved.pop("scheduler", config.scheduler),
            step_trace=config.step_trace,
            overlap=config.overlap,
            num_speculative_tokens=num_drafts,
            drafting_limit=_drafting_limit(config),
            speculative=_speculative(
                config,
                num_drafts,
                unseen_drafts,
                _free_tokens(config, resolved["device"] in ("cpu", "none"), eight_bits),
                model_cost,
            ),
            max_grammar_bytes=config.max_grammar_bytes,
            grammar_timeout_s=config.grammar_timeout_s,
            grammar_mask_timeout_s=config.grammar_mask_timeout_s,
            grammar_mask_average_s=config.grammar_mask_average_s,
            stall_timeout_s=config.stall_timeout_s,
            **resolved,
        )
        _check_whole_prompts(made, made.max_model_len, made.max_decode_tokens)
        return made

    @property
    def num_seats(self) -> int:
        """How many requests the engine runs at once, those of all its ranks together."""
        return self.max_num_seqs * self.expert_parallel_size

    @property
    def speculates(self) -> bool:
        """Whether rows get drafts other than those that grammars force."""
        return self.speculative.method != "none" and self.num_speculative_tokens > 0

    @property
    def looks_up_drafts(self) -> bool:
        return self.speculates and not self.has_draft_model

    @property
    def has_draft_model(self) -> bool:
        return self.speculates and self.speculative.method == "draft_model"

    @property
    def max_decode_tokens(self) -> int:
        """Maximum tokens of a step's decode rows together, drafts included."""
        return max(self.max_num_seqs, self.max_drafting_tokens)

    @property
    def max_drafting_tokens(self) -> int:
        """Maximum tokens of a step's decode rows together, if any carries drafts."""
        all_seats = self.max_num_seqs * (1 + self.num_speculative_tokens)
        return all_seats if self.drafting_limit is None else min(all_seats, self.drafting_limit)

    @property
    def max_atomic_span(self) -> int:
        """Longest span of a prompt that every step can take whole, whatever else it carries."""
        beside_decodes = self.max_num_batched_tokens - self.max_decode_tokens
        return (
            beside_decodes if self.scheduler.atomic_policy == "extend" else min(beside_decodes, self.max_prefill_tokens)
        )

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + answer that this engine can hold: the context, or the whole KV cache if that is smaller.
        The last token's KV is never written, so a cache of n slots holds n + 1 tokens."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size + 1)


def _check_whole_prompts(config: EngineConfig | ResolvedConfig, max_model_len: int, decode_tokens: int) -> None:
    """Raise ConfigError if prompts are not computed in chunks and the longest does not fit into a step. After a
    preemption that is a prompt with all of its answer but one token."""
    longest = max_model_len - 1
    beside = 0 if config.scheduler.batch_mode == "prefill_first" else decode_tokens
    limits = {"max_num_batched_tokens": config.max_num_batched_tokens - beside}
    if config.max_prefill_tokens is not None:
        limits["max_prefill_tokens"] = config.max_prefill_tokens
    name = min(limits, key=limits.__getitem__)
    if config.scheduler.enable_chunked_prefill or longest <= limits[name]:
        return
    raise ConfigError(
        f"scheduler.enable_chunked_prefill is false, so a step must hold the longest prompt, max_model_len - 1 "
        f"({longest}), but {name} ({getattr(config, name)}) leaves it {limits[name]} tokens: raise it, or lower "
        f"max_model_len to at most {limits[name] + 1}."
    )


def max_drafting_tokens(config: EngineConfig, can_draft: bool) -> int:
    """Return ResolvedConfig.max_drafting_tokens before anything is resolved; 0: no row has drafts. can_draft: the
    executor drafts by default."""
    if not (num_drafts := _num_speculative_tokens(config, can_draft)):
        return 0
    all_seats, limit = config.max_num_seqs * (1 + num_drafts), _drafting_limit(config)
    return all_seats if limit is None else min(all_seats, limit)


def _drafting_limit(config: EngineConfig) -> int | None:
    """Drafts that nobody asked for leave half of a step to prompts."""
    return None if config.num_speculative_tokens is not None else config.max_num_batched_tokens // 2


def _num_speculative_tokens(config: EngineConfig, can_draft: bool) -> int:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    if not can_draft or (config.overlap and config.speculative.method in ("auto", "none")):
        return 0
    return max(0, min(MOST_DRAFTS, config.max_num_batched_tokens // 2 - 1))


def _free_tokens(config: EngineConfig, on_cpu: bool, eight_bits: bool) -> int:
    """Return the default of SpeculativeConfig.free_tokens."""
    if not on_cpu:
        return FREE_TOKENS_ON_GPU
    return FREE_TOKENS_OF_INT8 if eight_bits or config.quantize in ("int8", "stored") else FREE_TOKENS_ON_CPU


def _speculative(
    config: EngineConfig, num_drafts: int, unseen: bool, free: int, model_cost: float | None
) -> SpeculativeConfig:
    speculative, method = config.speculative, config.speculative.method
    if method == "auto":
        method = "suffix" if unseen and num_drafts else "none"
    if method != "none" and not num_drafts:
        raise ConfigError(
            f"speculative.method is {method}, but a step has no room for drafts where max_num_batched_tokens is "
            f"{config.max_num_batched_tokens}: raise it, or set method none."
        )
    if method == "draft_model":
        speculative = replace(speculative, model_cost=speculative.model_cost or model_cost)
    return replace(speculative, method=method, free_tokens=speculative.free_tokens or free)
