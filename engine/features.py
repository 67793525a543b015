"""Owns the table of features that exclude other features, devices, kernels or kinds of models. Long, because it has
every rule with its reason.
Never raises or looks at a machine: the caller says what is on, and refuses with the text from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from operator import attrgetter, eq, is_, is_not, ne
from typing import Any


class Group(StrEnum):
    """The kind of a term in the table."""

    SETTING = "setting"
    DEVICE = "device"
    KERNELS = "kernels"
    MODEL = "kind of model"
    EXECUTOR = "executor"


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """A term of the table: something that is on or off in an engine."""

    title: str
    group: Group = Group.SETTING
    setting: str = ""
    """The dotted path of the setting that turns it on; empty if it is not a setting but a fact about the machine, the
    model or the executor."""
    when: Callable[[Any], Any] | None = None
    """Whether a value of the setting turns it on. None means any value but the default."""

    def fact(self, owner: Any, name: str) -> str | None:
        """Return `setting is value` if `owner.name` turns the feature on, else None."""
        value = getattr(owner, name)
        if self.when is None:
            is_on = value != next(spec.default for spec in fields(owner) if spec.name == name)
        else:
            is_on = bool(self.when(value))
        return f"{self.setting} is {shown(value)}" if is_on else None


def shown(value: Any) -> str:
    """Format a setting's value as in a config file. A table of values is only reported as set."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return str(list(value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str | int) else "set"


@dataclass(frozen=True, slots=True)
class Rule:
    """Each of `features` excludes each of `against` if all of `where` are on, too."""

    features: tuple[Feature, ...]
    against: tuple[Feature, ...]
    reason: str
    """The reason, as a clause that follows a colon."""
    where: tuple[Feature, ...] = ()


Facts = Mapping[Feature, str]
"""The features that are on, each with a clause that names it: the setting with its value, the device, the model."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two features that are on and exclude each other, with the rule behind it."""

    rule: Rule
    feature: Feature
    against: Feature

    @property
    def terms(self) -> tuple[Feature, ...]:
        return self.feature, self.against, *self.rule.where

    def text(self, on: Facts) -> str:
        """Return the refusal as one sentence: both features as they were turned on, and the reason."""
        beside = " and ".join(on[term] for term in self.terms[1:])
        return f"{on[self.feature]}, but {beside}: {self.rule.reason}."


# --- settings ---------------------------------------------------------------------------------------------------------

_NONE, _NOT_NONE = partial(is_, None), partial(is_not, None)


def _setting(title: str, setting: str, when: Callable[[Any], Any] | None) -> Feature:
    return Feature(title, Group.SETTING, setting, when)


TENSOR_PARALLEL = _setting("several ranks", "tensor_parallel_size", partial(ne, 1))
EXPERT_PARALLEL = _setting("ranks that share experts", "expert_parallel_size", partial(ne, 1))
LORA = _setting("LoRA adapters", "max_loras", bool)
OVERLAP = _setting("overlapped steps", "overlap", bool)
DRAFTS = _setting("a number of drafts", "num_speculative_tokens", bool)
NO_DRAFTS = _setting("no drafts", "num_speculative_tokens", partial(eq, 0))
LOOKUP = _setting("prompt lookup", "speculative.method", ("ngram", "suffix").__contains__)
DRAFT_MODEL = _setting("a draft model", "speculative.method", partial(eq, "draft_model"))
NO_DRAFT_MODEL = _setting("no draft model", "speculative.method", partial(ne, "draft_model"))
DRAFT_MODEL_NAME = _setting("a draft model's name", "speculative.model", _NOT_NONE)
DRAFT_MODEL_COST = _setting("a draft model's cost", "speculative.model_cost", _NOT_NONE)

QUANTIZE = _setting("weights rounded to int8", "quantize", partial(eq, "int8"))
STORED = _setting("weights in a checkpoint's own bits", "quantize", partial(eq, "stored"))
ROUNDED = _setting("activations rounded to int8", "activations", partial(eq, "int8"))
WHOLE_WEIGHTS = _setting("weights in the type of dtype", "quantize", partial(eq, "none"))
FP8_ACTIVATIONS = _setting("activations rounded to fp8", "activations", partial(eq, "fp8"))
BATCH_INVARIANT = _setting("batch invariance", "batch_invariant", bool)
NARROW_KV = _setting("KV cache in 8 bits", "kv_cache_dtype", partial(ne, "auto"))
FLOAT16 = _setting("float16", "dtype", partial(eq, "float16"))
CPU_KERNELS = _setting("kernels of a CPU", "kernels", None)

CUDA = _setting("a GPU asked for", "device", partial(eq, "cuda"))
GPU_ATTENTION = _setting("attention of a GPU", "attention", None)
GPU_GRAPHS = _setting("a choice of CUDA graphs", "cuda_graphs", None)
GRAPHS = _setting("CUDA graphs", "cuda_graphs", ("decode", "all").__contains__)
NO_GRAPHS = _setting("no CUDA graphs", "cuda_graphs", partial(eq, "none"))
DECODE_GRAPHS = _setting("CUDA graphs of decode steps", "cuda_graphs", partial(eq, "decode"))
GRAPH_DECODE_ROWS = _setting("sizes of CUDA graphs", "cuda_graph_decode_rows", _NOT_NONE)
GRAPH_MIXED_TOKENS = _setting("sizes of CUDA graphs", "cuda_graph_mixed_tokens", _NOT_NONE)
GRAPH_MIXED_ROWS = _setting("sizes of CUDA graphs", "cuda_graph_mixed_rows", _NOT_NONE)
GPU_MEMORY = _setting("a share of the GPU's memory", "gpu_memory_utilization", _NOT_NONE)
NUM_BLOCKS = _setting("a number of KV blocks", "num_kv_blocks", _NOT_NONE)
KV_MEMORY = _setting("memory for the KV cache", "kv_cache_memory_gib", _NOT_NONE)

FREE_TOKENS = _setting("tokens that cost little", "speculative.free_tokens", _NOT_NONE)
ANSWER_WEIGHT = _setting("a weight of answer tokens", "scheduler.answer_token_weight", partial(ne, 2.0))
TTFT_TARGET = _setting("a target for first tokens", "targets.ttft_ms", _NOT_NONE)
TPOT_TARGET = _setting("a target between tokens", "targets.tpot_ms", _NOT_NONE)

ENCODER_TOKENS = _setting("a limit of image tokens in a step", "max_encoder_tokens", None)
ENCODER_CACHE = _setting("a cache of images", "encoder_cache_memory_gib", None)

MIXED_STEPS = _setting("mixed steps", "scheduler.batch_mode", partial(ne, "prefill_first"))
CHUNKS_AHEAD = _setting("chunks ahead of decode rows", "scheduler.batch_mode", partial(eq, "mixed_prefill_first"))
FULL_RESERVE = _setting("memory for whole lives", "scheduler.reserve_mode", partial(eq, "full"))
PART_RESERVE = _setting("memory for less than whole lives", "scheduler.reserve_mode", partial(ne, "full"))
PREEMPTION = _setting("preemption", "scheduler.preempt_policy", partial(ne, "none"))
OFFLOAD = _setting("victims' KV in the machine's memory", "scheduler.preempt_policy", partial(eq, "offload"))
NO_PREEMPTION = _setting("no preemption", "scheduler.preempt_policy", partial(eq, "none"))
ENGINE_CHUNKS = _setting("prompts cut by the engine", "scheduler.chunk_owner", partial(eq, "engine"))
LOCAL_CHUNKS = _setting("chunks by the request alone", "scheduler.chunk_boundary", partial(eq, "request_local"))
WHOLE_PROMPTS = _setting("no chunked prefill", "scheduler.enable_chunked_prefill", partial(eq, False))
LONG_PREFILL = _setting("a limit of a prompt's chunk", "scheduler.long_prefill_token_threshold", bool)
LONG_DEFERS = _setting("long prompts that step aside", "scheduler.long_prefill_defer_tokens", bool)
CHUNK_HALVING = _setting("chunks that shrink with the context", "scheduler.chunk_halving_context", bool)
ONE_PARTIAL = _setting("one prompt at a time", "scheduler.max_partial_prefills", partial(eq, 1))
SNAPSHOTS = _setting("snapshots of recurrent state", "scheduler.state_snapshot_tokens", bool)

NO_PREFIX_CACHE = _setting("no prefix cache", "enable_prefix_caching", partial(eq, False))
HOST_TIER = _setting("KV in the machine's memory", "kv_tiers.host_memory_gib", bool)
NO_HOST_TIER = _setting("no KV in the machine's memory", "kv_tiers.host_memory_gib", partial(eq, 0))
DISK_TIER = _setting("KV on disk", "kv_tiers.disk_path", _NOT_NONE)
NO_DISK_TIER = _setting("no KV on disk", "kv_tiers.disk_path", _NONE)
DISK_SIZE = _setting("a bound of KV on disk", "kv_tiers.disk_gib", None)
DISK_KEY = _setting("a key of KV on disk", "kv_tiers.disk_key_file", _NOT_NONE)
NARROW_TIERS = _setting("KV in 8 bits in lower tiers", "kv_tiers.dtype", partial(ne, "auto"))
RETENTION = _setting("what stays in the machine's memory", "kv_tiers.retention", None)
LOAD_TIMEOUT = _setting("a wait for KV from lower tiers", "kv_tiers.load_timeout_s", None)

# --- devices, kernels, kinds of models, executors ---------------------------------------------------------------------

CPU = Feature("a CPU", Group.DEVICE)
GPU = Feature("a GPU", Group.DEVICE)
FAKE = Feature("the fake executor", Group.DEVICE)
NO_BYTES = Feature("a processor without products of bytes", Group.DEVICE)

NATIVE = Feature("the native kernels", Group.KERNELS, "kernels", partial(eq, "native"))
TORCH_CPU = Feature("torch's kernels", Group.KERNELS, "kernels", partial(eq, "torch_cpu"))
REFERENCE = Feature("the reference", Group.KERNELS, "kernels", partial(eq, "reference"))
UNCAPTURED_ATTENTION = Feature("torch attention", Group.KERNELS)
WIDE_ATTENTION = Feature("attention without Triton", Group.KERNELS)
TORCH_ADAPTERS = Feature("adapters without Triton", Group.KERNELS)
TORCH_EXPERTS = Feature("experts without Triton", Group.KERNELS)
TORCH_PRODUCTS = Feature("matrix products without Triton", Group.KERNELS)
NO_FP8_PRODUCTS = Feature("a GPU or kernels without products of fp8", Group.KERNELS)
TORCH_STATES = Feature("linear attention without Triton", Group.KERNELS)

EXPERTS = Feature("mixtures of experts", Group.MODEL)
NO_EXPERTS = Feature("models without experts", Group.MODEL)
LINEAR_ATTENTION = Feature("models with linear attention", Group.MODEL)
RECURRENT_STATE = Feature("models with recurrent state", Group.MODEL)
NO_STATE = Feature("models without recurrent state", Group.MODEL)
IMAGES = Feature("models that take images", Group.MODEL)
TEXT = Feature("models that take text alone", Group.MODEL)
PACKED = Feature("packed checkpoints", Group.MODEL)
NO_FP8_WEIGHTS = Feature("no weights in fp8", Group.MODEL)
NO_BYTE_WEIGHTS = Feature("no weights in 4 to 8 bits", Group.MODEL)
DRAFT_TAKES_IMAGES = Feature("one that takes images", Group.MODEL)
DRAFT_HAS_STATE = Feature("one with recurrent state", Group.MODEL)

NOTHING_MIXED = Feature("no mixed rows", Group.EXECUTOR)
NO_OVERLAP = Feature("no overlap", Group.EXECUTOR)
NOTHING_VERIFIED = Feature("no drafts", Group.EXECUTOR)
NO_SECOND_MODEL = Feature("no draft model", Group.EXECUTOR)
NO_ADAPTERS = Feature("no adapters", Group.EXECUTOR)
NO_CAPTURES = Feature("no captures", Group.EXECUTOR)

# --- the table --------------------------------------------------------------------------------------------------------

_GPU_SETTINGS = (
    GPU_MEMORY,
    GPU_ATTENTION,
    GPU_GRAPHS,
    GRAPH_DECODE_ROWS,
    GRAPH_MIXED_TOKENS,
    GRAPH_MIXED_ROWS,
)

RULES = (
    # where features run
    Rule((*_GPU_SETTINGS, FP8_ACTIVATIONS), (CPU, FAKE), "this setting has an effect only on a GPU"),
    Rule((CPU_KERNELS, ROUNDED), (GPU,), "this setting has an effect only on a CPU"),
    Rule((DRAFT_MODEL,), (GPU,), "a draft model runs only on the CPU"),
    Rule((FLOAT16,), (CPU,), "a CPU computes in bfloat16 or float32"),
    Rule((CUDA,), (FAKE,), "the fake executor uses no device"),
    Rule((NARROW_KV,), (FAKE,), "the fake executor stores no KV cache"),
    Rule((NARROW_TIERS,), (FAKE,), "the fake executor's KV has no numbers to round"),
    Rule((NARROW_TIERS,), (GPU,), "a GPU moves blocks byte for byte; kv_cache_dtype narrows both cache and tiers"),
    Rule((ROUNDED,), (FAKE,), "the fake executor multiplies no matrices"),
    Rule((IMAGES,), (GPU,), "models that take images run only on the CPU"),
    Rule((TENSOR_PARALLEL,), (LORA,), "on several GPUs, the other ranks are not told of adapters so far", (GPU,)),
    Rule((TENSOR_PARALLEL,), (FP8_ACTIVATIONS,), "on several GPUs, activations are not rounded so far", (GPU,)),
    Rule((TENSOR_PARALLEL, EXPERT_PARALLEL), (FAKE,), "the fake executor computes nothing that ranks could share"),
    Rule((EXPERT_PARALLEL,), (GPU,), "kernels of a GPU do not exchange rows with other ranks yet"),
    Rule((EXPERT_PARALLEL,), (IMAGES,), "images come to the leader alone"),
    Rule((EXPERT_PARALLEL,), (NO_EXPERTS,), "ranks would have nothing to share: more engine replicas serve as well"),
    # on which kernels
    Rule((LORA,), (TORCH_ADAPTERS,), "on a GPU, only the Triton kernels compute adapters"),
    Rule((NARROW_KV,), (WIDE_ATTENTION,), "on a GPU, only Triton's attention reads a KV cache in 8 bits"),
    Rule((NARROW_KV,), (REFERENCE,), "the reference kernels support only an unquantized KV cache"),
    Rule((ROUNDED,), (TORCH_CPU, REFERENCE), "on a CPU, only the native kernels multiply with activations in int8"),
    Rule((QUANTIZE,), (TORCH_CPU, REFERENCE), "on a CPU, only the native kernels compute with int8 weights"),
    Rule(
        (STORED,),
        (TORCH_CPU, REFERENCE),
        "on a CPU, only the native kernels compute with weights in a checkpoint's own 4 to 8 bits",
    ),
    Rule((STORED,), (GPU,), "on a GPU, packed weights stay as they are without it"),
    Rule((QUANTIZE,), (TORCH_PRODUCTS,), "without Triton, a GPU does not compute with int8 weights"),
    Rule((FP8_ACTIVATIONS,), (NO_FP8_PRODUCTS,), "products of fp8 need Triton and compute capability 8.9"),
    Rule(
        (BATCH_INVARIANT,),
        (TORCH_CPU, REFERENCE),
        "on a CPU, only the native kernels give a request bit-identical results in any batch",
    ),
    Rule(
        (BATCH_INVARIANT,),
        (WIDE_ATTENTION, TORCH_PRODUCTS),
        "on a GPU, only the Triton kernels give a request bit-identical results in any batch",
    ),
    Rule(
        (BATCH_INVARIANT,),
        (LINEAR_ATTENTION,),
        "on a GPU, linear attention adds up tokens in groups that depend on where chunks begin",
        (GPU,),
    ),
    Rule(
        (BATCH_INVARIANT,),
        (TENSOR_PARALLEL,),
        "on several GPUs, the order of sums over ranks depends on how much there is to sum",
        (GPU,),
    ),
    Rule((BATCH_INVARIANT,), (FP8_ACTIVATIONS,), "activations are rounded only in steps of many tokens"),
    Rule((GRAPHS,), (UNCAPTURED_ATTENTION,), "torch attention cannot be captured in CUDA graphs"),
    Rule(
        (GRAPHS,),
        (EXPERTS,),
        "without Triton, mixtures of experts synchronize with the GPU, which CUDA graphs cannot capture",
        (TORCH_EXPERTS,),
    ),
    Rule(
        (GRAPHS,),
        (RECURRENT_STATE,),
        "without Triton, linear attention reads data on the CPU, which CUDA graphs cannot capture",
        (TORCH_STATES,),
    ),
    # for which models
    Rule(
        (TENSOR_PARALLEL,),
        (EXPERTS,),
        "each GPU times its own kernels and chooses a token's experts by itself, and all would have to choose the same",
        (GPU,),
    ),
    Rule((LORA,), (IMAGES,), "adapters are not computed for models with an encoder"),
    Rule((LORA,), (LINEAR_ATTENTION,), "adapters are not computed for linear attention and its gates"),
    Rule((DRAFT_MODEL,), (IMAGES,), "draft models cannot process images"),
    Rule((DRAFT_MODEL,), (DRAFT_TAKES_IMAGES,), "the draft model must be a text-only model"),
    Rule(
        (DRAFT_MODEL,),
        (DRAFT_HAS_STATE,),
        "a draft model's recurrent state cannot be rolled back after a rejected draft",
    ),
    Rule(
        (DRAFTS, LOOKUP),
        (RECURRENT_STATE,),
        "on a GPU, recurrent state is not rolled back after a rejected draft",
        (GPU,),
    ),
    Rule((ROUNDED,), (NO_BYTE_WEIGHTS,), "activations are rounded only for weights of 4 to 8 bits that stay so"),
    Rule((FP8_ACTIVATIONS,), (NO_FP8_WEIGHTS,), "only weights in fp8 are multiplied by activations in fp8"),
    Rule((PACKED,), (IMAGES,), "quantized checkpoints are supported only for text models"),
    Rule((ENCODER_TOKENS, ENCODER_CACHE), (TEXT,), "this setting has an effect only with models that take images"),
    Rule((SNAPSHOTS,), (NO_STATE,), "snapshots need a model with recurrent state"),
    Rule(
        (HOST_TIER, DISK_TIER),
        (RECURRENT_STATE,),
        "lower tiers keep KV alone, and a prefix of this model needs its recurrent state, too",
    ),
    Rule(
        (ENGINE_CHUNKS,),
        (RECURRENT_STATE,),
        "chunk_owner engine does not support recurrent state; use chunk_owner scheduler",
    ),
    Rule(
        (ENGINE_CHUNKS, LOCAL_CHUNKS, WHOLE_PROMPTS),
        (IMAGES,),
        "a chunk may have to end before an image that is not encoded yet, which this setting does not allow",
    ),
    # beside which other features
    Rule(
        (DRAFT_MODEL,),
        (OVERLAP,),
        "a draft model goes on from a token that is not read back when an overlapped step is planned",
    ),
    Rule(
        (ROUNDED,),
        (WHOLE_WEIGHTS,),
        "activations are rounded only for weights of 4 to 8 bits; use quantize stored or int8",
    ),
    Rule((ROUNDED,), (NO_BYTES,), "without AVX-VNNI or AVX-512 VNNI, activations in int8 are slower and less accurate"),
    Rule((LOOKUP, DRAFT_MODEL), (NO_DRAFTS,), "num_speculative_tokens 0 disables speculation"),
    Rule(
        (DRAFT_MODEL_NAME, DRAFT_MODEL_COST),
        (NO_DRAFT_MODEL,),
        "settings of a draft model have an effect only with speculative.method draft_model",
    ),
    Rule(
        (HOST_TIER, DISK_TIER),
        (DRAFT_MODEL,),
        "lower tiers keep the main model's KV alone, and a draft model would read blocks that it never computed",
    ),
    Rule(
        (HOST_TIER, DISK_TIER),
        (NO_PREFIX_CACHE,),
        "lower tiers give KV back as blocks of the prefix cache",
    ),
    Rule((DISK_SIZE, DISK_KEY), (NO_DISK_TIER,), "this setting has an effect only with kv_tiers.disk_path"),
    Rule((OFFLOAD,), (NO_HOST_TIER,), "a victim's KV goes to the machine's memory, and none is set aside for it"),
    Rule((RETENTION,), (NO_HOST_TIER,), "this setting has an effect only with kv_tiers.host_memory_gib"),
    Rule((NARROW_TIERS,), (NARROW_KV,), "lower tiers keep the KV cache's own 8 bits"),
    Rule(
        (NARROW_TIERS,),
        (BATCH_INVARIANT,),
        "what comes back from lower tiers in 8 bits is rounded, so an answer depends on what was there",
    ),
    Rule(
        (LOAD_TIMEOUT, NARROW_TIERS),
        (NO_HOST_TIER,),
        "this setting has an effect only with kv_tiers.host_memory_gib or kv_tiers.disk_path",
        (NO_DISK_TIER,),
    ),
    Rule((TENSOR_PARALLEL, EXPERT_PARALLEL), (HOST_TIER, DISK_TIER), "lower tiers move the KV of one rank alone"),
    Rule((EXPERT_PARALLEL,), (TENSOR_PARALLEL,), "a rank that has requests of its own computes them alone"),
    Rule((EXPERT_PARALLEL,), (LORA,), "adapters are loaded by the leader alone"),
    Rule(
        (EXPERT_PARALLEL,),
        (TTFT_TARGET, TPOT_TARGET),
        "step times are predicted by a rank's own rows, and a step lasts as long as the slowest rank's",
    ),
    Rule(
        (ENGINE_CHUNKS,),
        (OVERLAP,),
        "chunk_owner engine runs several forward passes per step, and overlap supports only one",
    ),
    Rule((NUM_BLOCKS, KV_MEMORY), (GPU_MEMORY,), "both say how many KV blocks there are; set one of the two"),
    Rule(
        (GRAPH_DECODE_ROWS, GRAPH_MIXED_TOKENS, GRAPH_MIXED_ROWS),
        (NO_GRAPHS,),
        "graph sizes have no effect without CUDA graphs",
    ),
    Rule(
        (GRAPH_MIXED_TOKENS, GRAPH_MIXED_ROWS),
        (DECODE_GRAPHS,),
        "cuda_graphs decode captures only decode steps; use cuda_graphs all",
    ),
    Rule(
        (FULL_RESERVE,),
        (PREEMPTION,),
        "every request has memory for its whole life, so nothing is ever preempted; use preempt_policy none",
    ),
    Rule(
        (PART_RESERVE,),
        (NO_PREEMPTION,),
        "admitted requests may later outgrow memory; use preempt_policy retract or lifo, or reserve_mode full",
    ),
    Rule(
        (LOCAL_CHUNKS,),
        (ONE_PARTIAL,),
        "chunk_boundary request_local may leave several prompts partly computed; set max_partial_prefills to 0 or "
        "more than 1",
    ),
    Rule(
        (LOCAL_CHUNKS, LONG_PREFILL, CHUNK_HALVING),
        (ENGINE_CHUNKS,),
        "chunk_owner engine computes a prompt in one call, so other chunk limits have no effect",
    ),
    Rule(
        (ENGINE_CHUNKS, LOCAL_CHUNKS, LONG_PREFILL, LONG_DEFERS, CHUNK_HALVING),
        (WHOLE_PROMPTS,),
        "without chunked prefill a prompt is computed in one step, so settings of its chunks have no effect",
    ),
    Rule(
        (SNAPSHOTS,),
        (WHOLE_PROMPTS,),
        "recurrent state is saved at the end of a chunk, so prompts must be computed in chunks",
    ),
    Rule(
        (LONG_DEFERS,),
        (ENGINE_CHUNKS,),
        "chunk_owner engine computes a prompt in one step, and none is partly computed and could step aside",
    ),
    Rule(
        (TPOT_TARGET,),
        (ENGINE_CHUNKS, LOCAL_CHUNKS, WHOLE_PROMPTS),
        "a chunk ends where the step's time does, which depends on the rest of the step",
    ),
    Rule(
        (CHUNK_HALVING,),
        (TPOT_TARGET,),
        "the predicted time of a chunk already counts the context that it attends to",
    ),
    Rule(
        (TPOT_TARGET,),
        (CHUNKS_AHEAD,),
        "chunks get the time that decode rows leave of their target, and here they would get a step's tokens first",
    ),
    Rule((FREE_TOKENS, ANSWER_WEIGHT), (TPOT_TARGET, TTFT_TARGET), "with targets, what a token costs is measured"),
    # by which executor
    Rule((MIXED_STEPS,), (NOTHING_MIXED,), "this executor does not support mixed steps"),
    Rule((OVERLAP,), (NO_OVERLAP,), "this executor does not support overlapped steps"),
    Rule((DRAFTS,), (NOTHING_VERIFIED,), "this executor does not support drafts"),
    Rule((DRAFT_MODEL,), (NO_SECOND_MODEL,), "this executor does not support a draft model"),
    Rule((LORA,), (NO_ADAPTERS,), "this executor does not support adapters"),
    Rule((GRAPHS,), (NO_CAPTURES,), "this device does not support CUDA graphs"),
)
"""The first broken rule is reported. Rules that need the fewest facts come first."""


def terms_of(rules: Iterable[Rule]) -> tuple[Feature, ...]:
    """Return every feature that a rule names, once, in order."""
    return tuple({term: None for rule in rules for term in (*rule.features, *rule.against, *rule.where)})


def turned_on(config: Any, features: Iterable[Feature] | None = None, prefix: str = "") -> dict[Feature, str]:
    """Return the features that `config`'s settings turn on, by default among those of RULES. `prefix` is the path of
    this part in the whole config, such as `scheduler.`."""
    on = {}
    for feature in terms_of(RULES) if features is None else features:
        if feature.setting.startswith(prefix) and feature.setting:
            *path, name = feature.setting.removeprefix(prefix).split(".")
            if fact := feature.fact(attrgetter(".".join(path))(config) if path else config, name):
                on[feature] = fact
    return on


def find_conflict(
    on: Iterable[Feature], rules: Iterable[Rule] = RULES, feature: Feature | None = None
) -> Conflict | None:
    """Return the first broken rule. With `feature`, treat it as on, and look only at rules that name it."""
    together = {*on} if feature is None else {*on, feature}
    for rule in rules:
        for ours in rule.features:
            for other in rule.against:
                if together.issuperset((ours, other, *rule.where)):
                    conflict = Conflict(rule, ours, other)
                    if feature is None or feature in conflict.terms:
                        return conflict
    return None
