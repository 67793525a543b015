"""Owns the table of features that exclude other features, devices, kernels or kinds of models. Long, because it has
every rule with its reason.
Never raises or looks at a machine: the caller says what is on, and refuses with the text from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from operator import attrgetter, eq, is_not, ne
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

_NOT_NONE = partial(is_not, None)


def _setting(title: str, setting: str, when: Callable[[Any], Any] | None) -> Feature:
    return Feature(title, Group.SETTING, setting, when)


LORA = _setting("LoRA adapters", "max_loras", bool)
OVERLAP = _setting("overlapped steps", "overlap", bool)
DRAFTS = _setting("a number of drafts", "num_speculative_tokens", bool)
NO_DRAFTS = _setting("no drafts", "num_speculative_tokens", partial(eq, 0))
LOOKUP = _setting("prompt lookup", "speculative.method", ("ngram", "suffix").__contains__)
DRAFT_MODEL = _setting("a draft model", "speculative.method", partial(eq, "draft_model"))
NO_DRAFT_MODEL = _setting("no draft model", "speculative.method", partial(ne, "draft_model"))
DRAFT_MODEL_NAME = _setting("a draft model's name", "speculative.model", _NOT_NONE)
DRAFT_MODEL_COST = _setting("a draft model's cost", "speculative.model_cost", _NOT_NONE)

QUANTIZE = _setting("weights rounded to int8", "quantize", partial(ne, "none"))
BATCH_INVARIANT = _setting("batch invariance", "batch_invariant", bool)
NARROW_KV = _setting("KV cache in 8 bits", "kv_cache_dtype", partial(ne, "auto"))
FP8_KV = _setting("KV cache in fp8", "kv_cache_dtype", partial(eq, "fp8_e4m3"))
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

ENCODER_TOKENS = _setting("a limit of image tokens in a step", "max_encoder_tokens", None)
ENCODER_CACHE = _setting("a cache of images", "encoder_cache_memory_gib", None)

MIXED_STEPS = _setting("mixed steps", "scheduler.batch_mode", partial(ne, "prefill_first"))
FULL_RESERVE = _setting("memory for whole lives", "scheduler.reserve_mode", partial(eq, "full"))
PART_RESERVE = _setting("memory for less than whole lives", "scheduler.reserve_mode", partial(ne, "full"))
PREEMPTION = _setting("preemption", "scheduler.preempt_policy", partial(ne, "none"))
NO_PREEMPTION = _setting("no preemption", "scheduler.preempt_policy", partial(eq, "none"))
ENGINE_CHUNKS = _setting("prompts cut by the engine", "scheduler.chunk_owner", partial(eq, "engine"))
LOCAL_CHUNKS = _setting("chunks by the request alone", "scheduler.chunk_boundary", partial(eq, "request_local"))
LONG_PREFILL = _setting("a limit of a prompt's chunk", "scheduler.long_prefill_token_threshold", bool)
CHUNK_HALVING = _setting("chunks that shrink with the context", "scheduler.chunk_halving_context", bool)
ONE_PARTIAL = _setting("one prompt at a time", "scheduler.max_partial_prefills", partial(eq, 1))
SNAPSHOTS = _setting("snapshots of recurrent state", "scheduler.state_snapshot_tokens", bool)

# --- devices, kernels, kinds of models, executors ---------------------------------------------------------------------

CPU = Feature("a CPU", Group.DEVICE)
GPU = Feature("a GPU", Group.DEVICE)
FAKE = Feature("the fake executor", Group.DEVICE)

NATIVE = Feature("the native kernels", Group.KERNELS, "kernels", partial(eq, "native"))
TORCH_CPU = Feature("torch's kernels", Group.KERNELS, "kernels", partial(eq, "torch_cpu"))
REFERENCE = Feature("the reference", Group.KERNELS, "kernels", partial(eq, "reference"))
UNCAPTURED_ATTENTION = Feature("torch attention", Group.KERNELS)
TORCH_EXPERTS = Feature("experts without Triton", Group.KERNELS)
TORCH_STATES = Feature("linear attention without Triton", Group.KERNELS)

EXPERTS = Feature("mixtures of experts", Group.MODEL)
LINEAR_ATTENTION = Feature("models with linear attention", Group.MODEL)
RECURRENT_STATE = Feature("models with recurrent state", Group.MODEL)
NO_STATE = Feature("models without recurrent state", Group.MODEL)
IMAGES = Feature("models that take images", Group.MODEL)
TEXT = Feature("models that take text alone", Group.MODEL)
PACKED = Feature("packed checkpoints", Group.MODEL)
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
    Rule(_GPU_SETTINGS, (CPU, FAKE), "only a GPU follows it"),
    Rule((CPU_KERNELS, QUANTIZE, NARROW_KV, BATCH_INVARIANT), (GPU,), "only the CPU's kernels follow it"),
    Rule((LORA,), (GPU,), "adapters are computed on the CPU alone"),
    Rule((DRAFT_MODEL,), (GPU,), "a draft model runs on the CPU alone"),
    Rule((FLOAT16,), (CPU,), "a CPU computes in bfloat16 or float32"),
    Rule((CUDA,), (FAKE,), "it computes nothing, on no device"),
    Rule((NARROW_KV,), (FAKE,), "it keeps no K and V"),
    Rule((IMAGES,), (GPU,), "models that take images run on the CPU alone"),
    # on which kernels
    Rule((LORA,), (NATIVE,), "the native kernels compute no adapters"),
    Rule((FP8_KV,), (NATIVE,), "the native kernels keep no K and V in fp8"),
    Rule((NARROW_KV,), (REFERENCE,), "the reference keeps K and V as they are"),
    Rule((QUANTIZE,), (TORCH_CPU, REFERENCE), "only the native kernels compute with weights in 8 bits"),
    Rule((BATCH_INVARIANT,), (TORCH_CPU, REFERENCE), "only the native kernels give a row the same bits in any batch"),
    Rule((LINEAR_ATTENTION,), (NATIVE,), "the native kernels do not compute linear attention and its gates"),
    Rule((IMAGES,), (NATIVE,), "the native kernels have no encoder, and one position for each token"),
    Rule((GRAPHS,), (UNCAPTURED_ATTENTION,), "torch attention cannot be captured"),
    Rule((GRAPHS,), (EXPERTS,), "mixtures of experts by torch's operators wait for the device", (TORCH_EXPERTS,)),
    Rule(
        (GRAPHS,),
        (RECURRENT_STATE,),
        "linear attention by torch's operators reads its rows on the host",
        (TORCH_STATES,),
    ),
    # for which models
    Rule((LORA,), (IMAGES,), "adapters are not computed for models with an encoder"),
    Rule((LORA,), (LINEAR_ATTENTION,), "adapters are not computed for linear attention and its gates"),
    Rule((DRAFT_MODEL,), (IMAGES,), "no draft model reads images"),
    Rule((DRAFT_MODEL,), (DRAFT_TAKES_IMAGES,), "a draft model reads text alone"),
    Rule(
        (DRAFT_MODEL,),
        (DRAFT_HAS_STATE,),
        "its recurrent state could not be taken back to before a rejected draft",
    ),
    Rule(
        (DRAFTS, LOOKUP),
        (RECURRENT_STATE,),
        "on a GPU a recurrent state is not taken back to before a rejected draft",
        (GPU,),
    ),
    Rule((PACKED,), (IMAGES,), "packed checkpoints are read for text alone"),
    Rule((ENCODER_TOKENS, ENCODER_CACHE), (TEXT,), "only models that take images follow it"),
    Rule((SNAPSHOTS,), (NO_STATE,), "there is no recurrent state to keep"),
    Rule((ENGINE_CHUNKS,), (RECURRENT_STATE,), "the engine does not hand a recurrent state from chunk to chunk"),
    Rule(
        (ENGINE_CHUNKS, LOCAL_CHUNKS),
        (IMAGES,),
        "a chunk may have to end where an image begins that is not encoded yet",
    ),
    # beside which other features
    Rule((OVERLAP,), (DRAFTS,), "overlap plans a step before it is known how many tokens the one before gave"),
    Rule((LOOKUP, DRAFT_MODEL), (OVERLAP,), "no token is drafted with overlap"),
    Rule((LOOKUP, DRAFT_MODEL), (NO_DRAFTS,), "no token would be drafted"),
    Rule((DRAFT_MODEL_NAME, DRAFT_MODEL_COST), (NO_DRAFT_MODEL,), "only the method draft_model follows it"),
    Rule((ENGINE_CHUNKS,), (OVERLAP,), "the engine runs several forwards in one step, and overlap launches one"),
    Rule((NUM_BLOCKS, KV_MEMORY), (GPU_MEMORY,), "both say how many KV blocks there are; set one of the two"),
    Rule((GRAPH_DECODE_ROWS, GRAPH_MIXED_TOKENS, GRAPH_MIXED_ROWS), (NO_GRAPHS,), "there are no graphs to have sizes"),
    Rule((GRAPH_MIXED_TOKENS, GRAPH_MIXED_ROWS), (DECODE_GRAPHS,), "no step with prefill is captured"),
    Rule(
        (FULL_RESERVE,),
        (PREEMPTION,),
        "every request has memory for its whole life, so that nobody would be preempted; use preempt_policy none",
    ),
    Rule(
        (PART_RESERVE,),
        (NO_PREEMPTION,),
        "more requests are admitted than fit for ever; use preempt_policy retract or lifo, or reserve_mode full",
    ),
    Rule(
        (LOCAL_CHUNKS,),
        (ONE_PARTIAL,),
        "prompts are cut by their own length, so that several may be partly computed; set it to 0 or more than 1",
    ),
    Rule(
        (LOCAL_CHUNKS, LONG_PREFILL, CHUNK_HALVING),
        (ENGINE_CHUNKS,),
        "the engine computes a prompt in one call, and nothing else cuts it",
    ),
    # by which executor
    Rule((MIXED_STEPS,), (NOTHING_MIXED,), "decode rows are put beside prefill"),
    Rule((OVERLAP,), (NO_OVERLAP,), "steps are fed tokens that are not read back yet"),
    Rule((DRAFTS,), (NOTHING_VERIFIED,), "drafts have to be verified"),
    Rule((DRAFT_MODEL,), (NO_SECOND_MODEL,), "a second model has to be computed"),
    Rule((LORA,), (NO_ADAPTERS,), "adapters have to be computed"),
    Rule((GRAPHS,), (NO_CAPTURES,), "steps cannot be captured there"),
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
