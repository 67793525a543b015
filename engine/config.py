"""Owns the engine's two frozen configs: what was asked and what came of it. Long: each setting with its text.
Never reads the environment or probes hardware; `engine.build.resolve` and `engine.execution.device` do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from engine.features import RULES, Facts, Rule, find_conflict, turned_on
from engine.multimodal_inputs import InputKind

DEFAULT_MODEL = "smollm2-135m-instruct"
MOST_DRAFTS = 4
"""Of a decode row, unless the config says otherwise: JSON's fixed parts are rarely longer, and a row of five tokens
takes little longer than one of one."""

FREE_TOKENS_ON_CPU, FREE_TOKENS_OF_INT8, FREE_TOKENS_ON_GPU = 8, 4, 128
"""See SpeculativeConfig.free_tokens. The GPU's is a guess on the safe side: nobody has measured it."""


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


def refuse_conflicts(on: Facts, rules: Iterable[Rule] = RULES) -> None:
    """Raise ConfigError for the first rule that features which are on break: they do not go together."""
    if conflict := find_conflict(on, rules):
        raise ConfigError(conflict.text(on))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """The scripted executor's behaviour: no weights, deterministic tokens."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    reply: str | None = setting(None, "Text that every request is answered with; unset gives a hash of the prefix.")
    step_delay_ms: float = setting(0.0, "How long a step takes.", ge=0)
    token_delay_ms: float = setting(0.0, "Added to a step for each token that it computes.", ge=0)
    recurrent_state: bool = setting(False, "Act as a hybrid model, with recurrent state besides KV.")
    images: bool = setting(False, "Act as a model that takes images.")

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Drafts: tokens that followed where the newest tokens of a text stood in it before; or what a smaller model
    proposes."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    method: Literal["auto", "none", "ngram", "suffix", "draft_model"] = setting(
        "auto",
        "What a decode row is drafted besides what a grammar forces: the tokens after the latest place in its prompt "
        "and answer where its newest tokens stood (`ngram`), or after the place where most of them stood (`suffix`), "
        "or what a smaller model proposes (`draft_model`). Answers are the same with any. `auto`: `suffix` with the "
        "native kernels, with which they are so to the bit, else `none`.",
    )
    model: str | None = setting(
        None,
        "`draft_model`: that model, named as the main one is: a directory, a hub id or a .gguf file, of the same "
        "vocabulary. On the CPU; its K and V share kv_cache_memory_gib.",
    )
    model_cost: float | None = setting(
        None,
        "`draft_model`, `adaptive`: how long its forward pass of one token takes, where the main model's takes 1. "
        "Unset: by the weights that both read.",
        gt=0,
    )
    min_match: int = setting(2, "Fewest newest tokens that must have stood in the text before.", ge=1, le=16)
    max_match: int = setting(4, "`ngram`: most newest tokens that are looked for, then fewer and fewer.", ge=1, le=16)
    num_tokens: int = setting(
        8,
        "Most tokens that are drafted for a row; in all rows together, as many as num_speculative_tokens says.",
        ge=1,
    )
    adaptive: bool = setting(
        True,
        "Draft as many tokens as are expected to pay, by how often a request's drafts were right and by how many rows "
        "share the step, and so none under load. Off: always num_tokens, for measurements.",
    )
    free_tokens: int | None = setting(
        None,
        "`adaptive`: tokens of a step up to which another one takes little time, as the weights are read in any case. "
        "Unset: 8 on a CPU, 4 where weights are in 8 bits, 128 on a GPU.",
        ge=1,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.method == "draft_model" and not self.model:
            raise ConfigError("speculative.method is draft_model, and speculative.model does not say which.")
        refuse_conflicts(turned_on(self, prefix="speculative."))
        if self.method == "ngram" and self.max_match < self.min_match:
            raise ConfigError(f"speculative.min_match ({self.min_match}) must not exceed max_match ({self.max_match}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are composed, memory is reserved and, when it runs out, who gives it up."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    batch_mode: Literal["mixed", "prefill_first", "decode_first"] = setting(
        "mixed",
        "`mixed`: every step carries all decode rows, then prefill chunks. `prefill_first`: prefill alone while there "
        "is any. `decode_first`: decode rows alone while there are any. The next two settings bound these.",
    )
    decode_starve_ms: float = setting(
        200.0,
        "Longest time without decode rows while requests decode, where prefill has steps of its own: `prefill_first`, "
        "`chunk_owner: engine`, `prompt_logprobs_step: dedicated`. A step that has begun is not cut short.",
        ge=0,
    )
    prefill_starve_ms: float = setting(
        2000.0, "`decode_first` and decode_finish_tokens: longest time that a prompt waits for its next chunk.", ge=0
    )
    decode_finish_tokens: int = setting(
        0, "Steps carry no prefill while a request has at most this many tokens left to answer. 0: off.", ge=0
    )
    reserve_mode: Literal["full", "learned", "ratio", "prompt"] = setting(
        "learned",
        "Memory that must be free to admit a request, besides its prompt's: for its whole life; for what all answers "
        "are expected to take at the worst, by how long those before them were; for a share of all that they may still "
        "take, which falls until memory runs out; or none.",
    )
    preempt_policy: Literal["none", "lifo", "retract"] = setting(
        "retract",
        "Who gives up memory when decoding runs out of it: the latest arrival, or who loses least (shortest answer, "
        "then longest prompt). The oldest request never does.",
    )
    requeue: Literal["arrival", "front", "back"] = setting(
        "arrival", "Where a preempted request waits: by its arrival, before all others, or behind them."
    )
    reserve_margin: float = setting(
        0.5, "`learned`: standard deviations of the expected memory that are kept free besides.", ge=0, le=8
    )
    reserve_caution: float = setting(
        0.2,
        "`learned`: how many more each step that preempts adds, up to 4; 300 steps without a preemption take it back.",
        ge=0,
        le=4,
    )
    reserve_prior: int = setting(
        256,
        "`learned`: median of all answers before any was seen, in tokens; at most a sixteenth of what the KV cache "
        "holds.",
        ge=1,
    )
    reserve_window: int = setting(
        512, "`learned`: answers after which what is known of a tenant's counts half as much.", ge=8
    )
    reserve_tenants: int = setting(
        64, "`learned`: tenants whose answers are counted apart, those with requests last. 0: none.", ge=0
    )
    ratio_init: float = setting(0.7, "`ratio`: share of the remaining answers reserved at first.", gt=0, le=1)
    ratio_min: float = setting(0.21, "`ratio`: the share that it falls to.", gt=0, le=1)
    ratio_decay_steps: int = setting(600, "`ratio`: steps from the first share to the least.", ge=1)
    ratio_decay_on: Literal["decode_only", "any_decode"] = setting(
        "any_decode", "Steps that lower the share: those without prefill, or all that decode."
    )
    retract_steps: int = setting(20, "`ratio`: tokens a request is expected to go on for after a preemption.", ge=0)
    reserve_clip: int = setting(4096, "`learned`, `ratio`: most answer tokens of one request that count.", ge=1)
    watermark_blocks: int = setting(1, "`prompt`: blocks that stay free at an admission.", ge=0)
    max_partial_prefills: int = setting(
        1, "Most prompts of one priority that are partly computed after a step. 0: as many as there are seats.", ge=0
    )
    long_prefill_token_threshold: int = setting(
        0,
        "Most tokens of one prompt in a step. 0: no limit. Short prompts use what it leaves, also those behind a "
        "long one that waits for max_partial_prefills.",
        ge=0,
    )
    chunk_halving_context: int | None = setting(
        None,
        "Context at which a chunk has half as many tokens, at twice that a third, for attention to it takes time as "
        "well: the last chunks of a long prompt then take as long as the first. 0: no less at any. Unset: where "
        "attention costs as much as the model's matrix products.",
        ge=0,
    )
    chunk_align: int | None = setting(
        None, "A chunk that ends inside its prompt ends at a multiple of this position. Unset: block_size.", ge=1
    )
    chunk_boundary: Literal["shared", "request_local"] = setting(
        "shared",
        "`shared`: chunks take what the step has left. `request_local`: chunk ends depend on the request alone.",
    )
    chunk_owner: Literal["scheduler", "engine"] = setting(
        "scheduler",
        "Who cuts a prompt that is longer than a step's prefill. `engine`: all of it in one step of its own, forward "
        "after forward, which decode rows wait for; for offline use and comparisons.",
    )
    atomic_policy: Literal["defer", "extend"] = setting(
        "defer",
        "A span that must not be cut and does not fit into what is left of max_prefill_tokens: a later step takes it, "
        "or the chunk goes on to its end, past that limit but within max_num_batched_tokens.",
    )
    prompt_logprobs_step: Literal["mixed", "dedicated"] = setting(
        "mixed",
        "Chunks whose prompt tokens are scored share steps with decode rows, or have steps without any (bounded by "
        "decode_starve_ms).",
    )
    prefill_fill_ratio: float = setting(
        0.0,
        "While requests decode, prefill waits until this share of max_prefill_tokens is queued, prefix hits included. "
        "0: it never waits. The next two settings bound it.",
        ge=0,
        le=1,
    )
    coalesce_waiting_ms: float = setting(300.0, "Longest time that a new prompt is held back for that.", ge=0)
    coalesce_partial_ms: float = setting(80.0, "The same for the next chunk of a prompt that has begun.", ge=0)
    priority_age_ms: float = setting(
        10_000.0,
        "A request that waited this long goes before all priorities and shares; a begun prompt that stood still for it "
        "goes on. Where everybody waits longer, arrival alone decides.",
        ge=0,
    )
    answer_token_weight: float = setting(
        2.0, "What an answer token counts against its tenant's share; a prompt token counts 1.", ge=0
    )
    state_snapshot_tokens: int = setting(
        0,
        "Hybrid models: a snapshot of the recurrent state at each multiple of this position, a multiple of block_size, "
        "for prefix hits to start from. 0: none, and no prefix hits.",
        ge=0,
    )
    state_snapshots: int = setting(64, "Hybrid models: snapshots that are kept.", ge=1)
    admission_order: Literal["strict", "bypass"] = setting(
        "strict",
        "Whether requests for which there is memory may overtake one for which there is none yet. Either way, prompts "
        "that a step takes whole pass one that cannot use what the step has left.",
    )
    max_overtakes: int = setting(16, "`bypass`: how often a request may be overtaken.", ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        refuse_conflicts(turned_on(self, prefix="scheduler."))
        if self.ratio_min > self.ratio_init:
            raise ConfigError(f"ratio_min ({self.ratio_min}) must not exceed ratio_init ({self.ratio_init}).")


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
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Where steps run. `auto`: on the GPU that the replica has (engine_num_gpus), else on the CPU.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Activations, and weights and KV cache unless these are asked for in fewer bits. `auto`: bfloat16 where the "
        "device multiplies it natively, else float32. `float16`: on a GPU alone.",
    )
    max_model_len: int | None = setting(
        None, "Longest prompt + answer, in tokens. Unset: what the checkpoint was trained for.", ge=1
    )
    block_size: int = setting(16, "Tokens in a KV block.", ge=1)
    kv_cache_dtype: Literal["auto", "int8", "fp8_e4m3"] = setting(
        "auto",
        "What K and V are kept in, on a CPU. `int8`, `fp8_e4m3`: a byte a number, and a scale for each token and KV "
        "head, so that about twice as many tokens fit in bfloat16's memory; fp8 by torch's operators alone. `auto`: "
        "the type of `dtype`. What it costs in accuracy: docs/how-to/quantised-models.md.",
    )
    kv_cache_memory_gib: float | None = setting(
        None,
        "Memory for the KV cache, in GiB; more than is free is refused. Unset: on the CPU, 80 % of what weights leave "
        "of the engine's share of the free memory, and no more than max_num_seqs requests of max_model_len tokens can "
        "hold; on a GPU, what gpu_memory_utilization leaves. More: docs/explanation/memory.md.",
        gt=0,
    )
    num_kv_blocks: int | None = setting(None, "KV blocks; overrides kv_cache_memory_gib.", ge=1)
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of the GPU's memory that the engine takes: KV blocks have what weights, the largest step and captured "
        "steps leave of it. Unset: 0.9.",
        gt=0,
        le=1,
    )
    max_num_seqs: int = setting(64, "Most requests that run at a time.", ge=1)
    max_num_batched_tokens: int = setting(512, "Most tokens in a step, decode and prefill rows together.", ge=2)
    max_prefill_tokens: int | None = setting(
        None, "Most prefill tokens in a step. Unset: all that decode rows leave of max_num_batched_tokens.", ge=1
    )
    max_queued_requests: int = setting(1024, "Most requests waiting to be admitted; one more is refused.", ge=0)
    enable_prefix_caching: bool = setting(True, "Reuse the KV blocks of a prompt prefix that was computed before.")
    max_encoder_tokens: int = setting(
        512,
        "Most prompt tokens of images that a step encodes before its rows; a single one that has more is encoded "
        "whole, and no other beside it.",
        ge=1,
    )
    encoder_cache_memory_gib: float = setting(
        0.25,
        "Memory for encoded images, in GiB: one that comes again is not encoded again. What running requests need is "
        "kept.",
        gt=0,
    )
    max_loras: int = setting(
        0,
        "LoRA adapters that an engine has in memory at a time; the least recently used one makes room, unless requests "
        "that run use it. 0: none are served. On the CPU, by torch's operators: not by the native kernels.",
        ge=0,
    )
    max_lora_rank: int = setting(16, "Highest rank of an adapter; one that has a higher one is refused.", ge=1)
    overlap: bool = setting(
        False,
        "Plan and launch a step before the one before it is read back, so that the device never waits for Python.",
    )
    num_speculative_tokens: int | None = setting(
        None,
        "Most tokens that a decode row carries besides its newest where a grammar forces what follows, to be verified "
        "together; and, a seat, most drafted tokens of a step. Unset: 4, and fewer where decode rows would take more "
        "than half of max_num_batched_tokens; 0 with overlap, and on a GPU with recurrent state.",
        ge=0,
    )
    max_grammar_bytes: int = setting(2**18, "Longest grammar of an answer.", ge=1)
    grammar_timeout_s: float = setting(
        2.0, "How long a request waits for its grammar to be compiled before it is refused.", gt=0
    )
    stall_timeout_s: float = setting(
        30.0,
        "An engine that has not finished a step for this long, nor for ten times its slowest step lately, is "
        "unhealthy; Serve then restarts it.",
        gt=0,
    )
    num_threads: int | None = setting(
        None, "Threads that compute a step. Unset: the machine's cores shared among the engine replicas.", ge=1
    )
    kernels: Literal["auto", "native", "torch_cpu", "reference"] = setting(
        "auto",
        "What a step runs on. `native`: C++ compiled for this processor at the first start; `torch_cpu`: torch's own "
        "operators; `reference`: slow, the definition of correct. `auto`: native where there is a compiler and the "
        "model's shape fits, else torch_cpu; the log says why.",
    )
    attention: Literal["auto", "vllm_flash_attn", "triton", "torch"] = setting(
        "auto",
        "Attention on a GPU. `vllm_flash_attn`: that package, or `flash_attn`, or FlashAttention-3, whichever imports; "
        "`triton`: our own; `torch`: slow, the definition of correct. `auto`: the first that runs; the log says why.",
    )
    cuda_graphs: Literal["auto", "none", "decode", "all"] = setting(
        "auto",
        "Steps that a GPU replays as captured graphs: none, those of decode rows alone, or all. `auto`: all, where the "
        "attention can be captured.",
    )
    cuda_graph_decode_rows: tuple[int, ...] | None = setting(
        None, "Rows of captured decode steps, up to max_num_seqs; a step is padded to the next. Unset: chosen."
    )
    cuda_graph_mixed_tokens: tuple[int, ...] | None = setting(
        None, "Tokens of captured steps with prefill, up to max_num_batched_tokens. Unset: chosen."
    )
    cuda_graph_mixed_rows: tuple[int, ...] | None = setting(
        None, "Rows of captured steps with prefill, up to max_num_seqs. Unset: chosen."
    )
    quantize: Literal["none", "int8"] = setting(
        "none",
        "Round weight matrices as they are loaded. `int8`: a byte a weight and a scale for each output, so that half "
        "as much is read for each token; native kernels only. What it costs in accuracy: "
        "docs/how-to/quantised-models.md.",
    )
    batch_invariant: bool = setting(
        False,
        "Refuse to start unless a request has the same tokens and log-probabilities, to the bit, alone, in any batch, "
        "however its prompt is cut, and after a migration. The native kernels always keep that, at no cost.",
    )
    step_trace: bool = setting(False, "Log a line for every step: its rows, its tokens, and how long it took.")
    speculative: SpeculativeConfig = field(
        default_factory=SpeculativeConfig,
        metadata={"description": "Drafts besides those that grammars force."},
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
    scheduler: SchedulerConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    step_trace: bool
    overlap: bool
    num_speculative_tokens: int
    max_grammar_bytes: int
    grammar_timeout_s: float
    dtype: str
    device: str
    """`cpu`, or the GPU's name."""
    kernels: str
    """On a GPU: the attention."""
    num_threads: int
    stall_timeout_s: float
    speculative: SpeculativeConfig = SpeculativeConfig(method="none")
    """With a method that is not `auto`, with free_tokens, and with a draft model's model_cost."""
    kv_cache_dtype: str = "auto"
    """`auto`: that of `dtype`."""
    recurrent_state: bool = False
    """The model has state besides KV: requests hold state slots, and prefix hits need snapshots."""
    drafting_limit: int | None = None
    """Decode rows carry drafts up to so many tokens of a step together; None: to what all seats could carry."""
    inputs: tuple[InputKind, ...] = ()
    """What the model takes besides text."""
    max_encoder_tokens: int = 512
    encoder_cache_tokens: int = 0
    """Tokens of inputs whose embeddings fit into encoder_cache_memory_gib."""
    max_loras: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """Setting -> why it has its value, one sentence each; logged at start."""

    @classmethod
    def of(
        cls,
        asked: EngineConfig,
        *,
        drafts: bool = False,
        unseen_drafts: bool = False,
        eight_bits: bool = False,
        model_cost: float | None = None,
        **found: Any,
    ) -> ResolvedConfig:
        """What was asked and needs no resolving, with what was found. `drafts`: the executor makes some unasked;
        `unseen_drafts`: and answers are the same to the bit with any. `eight_bits`: weights are, in the kernels.
        `model_cost`: of the draft model, unless it was asked for.

        Raises:
            ConfigError: drafts are asked for, and there can be none.
        """
        num_drafts = _num_speculative_tokens(asked, drafts)
        return cls(
            block_size=asked.block_size,
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
            max_prefill_tokens=asked.max_prefill_tokens or asked.max_num_batched_tokens,
            max_queued_requests=asked.max_queued_requests,
            enable_prefix_caching=asked.enable_prefix_caching,
            max_encoder_tokens=asked.max_encoder_tokens,
            max_loras=asked.max_loras,
            kv_cache_dtype=asked.kv_cache_dtype,
            scheduler=found.pop("scheduler", asked.scheduler),
            step_trace=asked.step_trace,
            overlap=asked.overlap,
            num_speculative_tokens=num_drafts,
            drafting_limit=None if asked.num_speculative_tokens is not None else asked.max_num_batched_tokens // 2,
            speculative=_speculative(
                asked,
                num_drafts,
                unseen_drafts,
                _free_tokens(asked, found["device"] in ("cpu", "none"), eight_bits),
                model_cost,
            ),
            max_grammar_bytes=asked.max_grammar_bytes,
            grammar_timeout_s=asked.grammar_timeout_s,
            stall_timeout_s=asked.stall_timeout_s,
            **found,
        )

    @property
    def speculates(self) -> bool:
        """Whether rows are drafted more than what grammars force."""
        return self.speculative.method != "none" and self.num_speculative_tokens > 0 and not self.overlap

    @property
    def looks_up_drafts(self) -> bool:
        return self.speculates and not self.has_draft_model

    @property
    def has_draft_model(self) -> bool:
        return self.speculates and self.speculative.method == "draft_model"

    @property
    def max_decode_tokens(self) -> int:
        """Of a step's decode rows together, drafts and all."""
        return max(self.max_num_seqs, self.max_drafting_tokens)

    @property
    def max_drafting_tokens(self) -> int:
        """Of a step's decode rows together, if any carries drafts."""
        of_all_seats = self.max_num_seqs * (1 + self.num_speculative_tokens)
        return of_all_seats if self.drafting_limit is None else min(of_all_seats, self.drafting_limit)

    @property
    def max_atomic_span(self) -> int:
        """Longest span of a prompt that every step could take whole, whatever else it carries."""
        beside_decodes = self.max_num_batched_tokens - self.max_decode_tokens
        return (
            beside_decodes if self.scheduler.atomic_policy == "extend" else min(beside_decodes, self.max_prefill_tokens)
        )

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + answer that this engine can hold: the context, or the whole KV cache if that is smaller.
        The last token's KV is never written, so a cache of n slots holds n + 1 tokens."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size + 1)


def _num_speculative_tokens(asked: EngineConfig, can_draft: bool) -> int:
    if asked.num_speculative_tokens is not None:
        return asked.num_speculative_tokens
    if asked.overlap or not can_draft:
        return 0
    return max(0, min(MOST_DRAFTS, asked.max_num_batched_tokens // 2 - 1))


def _free_tokens(asked: EngineConfig, on_cpu: bool, eight_bits: bool) -> int:
    """What SpeculativeConfig.free_tokens is where it is left unset."""
    if not on_cpu:
        return FREE_TOKENS_ON_GPU
    return FREE_TOKENS_OF_INT8 if eight_bits or asked.quantize == "int8" else FREE_TOKENS_ON_CPU


def _speculative(
    asked: EngineConfig, num_drafts: int, unseen: bool, free: int, model_cost: float | None
) -> SpeculativeConfig:
    wished, method = asked.speculative, asked.speculative.method
    if method == "auto":
        method = "suffix" if unseen and num_drafts else "none"
    if method != "none" and not num_drafts:
        raise ConfigError(
            f"speculative.method is {method}, but a step has no room for drafts where max_num_batched_tokens is "
            f"{asked.max_num_batched_tokens}: raise it, or set method none."
        )
    if method == "draft_model":
        wished = replace(wished, model_cost=wished.model_cost or model_cost)
    return replace(wished, method=method, free_tokens=wished.free_tokens or free)
