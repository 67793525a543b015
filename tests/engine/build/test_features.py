"""Owns the promise that the table of engine.features is exactly what is refused: each rule is broken by an engine.
Never reads a weight: all of it is refused before."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine import features
from engine.build.cpu import start_on_cpu
from engine.build.engine import check_engine
from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.config import ConfigError, EngineConfig, KvTiersConfig, SchedulerConfig, SpeculativeConfig, Targets
from engine.core.capabilities import check_capabilities
from engine.execution.device import HostDevice
from engine.features import RULES, Conflict, Feature, Group, find_conflict, shown, terms_of
from engine.models.config import CheckpointError
from engine.step import Capabilities
from kernels.choice import TRITON_TABLE
from tests.support.engines import resolved_config
from tests.support.fake_device import FakeDevice
from tests.support.fake_flash import FakeFlash
from tests.support.tiny_models import edit_config, save_model
from tests.support.tiny_vision import save_vision_model

ROOT = Path(__file__).resolve().parents[3]

VALUES: dict[Feature, Any] = {
    features.TENSOR_PARALLEL: 2,
    features.EXPERT_PARALLEL: 2,
    features.LORA: 2,
    features.OVERLAP: True,
    features.DRAFTS: 2,
    features.NO_DRAFTS: 0,
    features.LOOKUP: "ngram",
    features.DRAFT_MODEL: "draft_model",
    features.NO_DRAFT_MODEL: "suffix",
    features.DRAFT_MODEL_NAME: "small",
    features.DRAFT_MODEL_COST: 0.5,
    features.QUANTIZE: "int8",
    features.STORED: "stored",
    features.ROUNDED: "int8",
    features.WHOLE_WEIGHTS: "none",
    features.FP8_ACTIVATIONS: "fp8",
    features.BATCH_INVARIANT: True,
    features.NARROW_KV: "int8",
    features.FLOAT16: "float16",
    features.CPU_KERNELS: "torch_cpu",
    features.CUDA: "cuda",
    features.GPU_ATTENTION: "triton",
    features.GPU_GRAPHS: "none",
    features.GRAPHS: "all",
    features.NO_GRAPHS: "none",
    features.DECODE_GRAPHS: "decode",
    features.GRAPH_DECODE_ROWS: (64,),
    features.GRAPH_MIXED_TOKENS: (64, 512),
    features.GRAPH_MIXED_ROWS: (64,),
    features.GPU_MEMORY: 0.5,
    features.NUM_BLOCKS: 8,
    features.KV_MEMORY: 2.5,
    features.ENCODER_TOKENS: 5,
    features.ENCODER_CACHE: 1.0,
    features.MIXED_STEPS: "mixed",
    features.CHUNKS_AHEAD: "mixed_prefill_first",
    features.FULL_RESERVE: "full",
    features.PART_RESERVE: "ratio",
    features.PREEMPTION: "lifo",
    features.OFFLOAD: "offload",
    features.NO_PREEMPTION: "none",
    features.ENGINE_CHUNKS: "engine",
    features.LOCAL_CHUNKS: "request_local",
    features.LONG_PREFILL: 64,
    features.WHOLE_PROMPTS: False,
    features.LONG_DEFERS: 1024,
    features.CHUNK_HALVING: 4096,
    features.ONE_PARTIAL: 1,
    features.SNAPSHOTS: 16,
    features.NO_PREFIX_CACHE: False,
    features.HOST_TIER: 0.5,
    features.NO_HOST_TIER: 0.0,
    features.DISK_TIER: "kv",
    features.NO_DISK_TIER: None,
    features.DISK_SIZE: 2.5,
    features.DISK_KEY: "key",
    features.NARROW_TIERS: "int8",
    features.RETENTION: "lru",
    features.LOAD_TIMEOUT: 1.5,
    features.FREE_TOKENS: 16,
    features.ANSWER_WEIGHT: 3.0,
    features.TTFT_TARGET: 1000.0,
    features.TPOT_TARGET: 50.0,
    features.TORCH_CPU: "torch_cpu",
    features.REFERENCE: "reference",
}
"""A value for each feature's setting that turns it on."""

BESIDE: dict[Feature, dict[str, Any]] = {
    features.LOCAL_CHUNKS: {"scheduler.max_partial_prefills": 0},
    features.DRAFT_MODEL: {"speculative.model": "small"},
    features.NARROW_TIERS: {"kv_tiers.host_memory_gib": 0.5},
    features.ROUNDED: {"quantize": "int8"},
    features.NO_BYTE_WEIGHTS: {"quantize": "stored"},
    features.UNCAPTURED_ATTENTION: {"attention": "torch"},
    features.FAKE: {"executor": "fake"},
    features.NO_SECOND_MODEL: {"num_speculative_tokens": 2},
}
"""What else has to be set, so that no other rule is broken first."""

KINDS: dict[Feature, str] = {
    features.EXPERTS: "qwen3_moe",
    features.LINEAR_ATTENTION: "qwen3_5",
    features.RECURRENT_STATE: "qwen3_5",
    features.IMAGES: "vision",
    features.PACKED: "packed vision",
    features.DRAFT_TAKES_IMAGES: "llama",
    features.DRAFT_HAS_STATE: "llama",
}
"""The checkpoint of a model that has the feature; all others are llama's."""

DRAFTS = {features.DRAFT_TAKES_IMAGES: "vision", features.DRAFT_HAS_STATE: "qwen3_next"}

LACKS: dict[Feature, str] = {
    features.NOTHING_MIXED: "mixed_rows",
    features.NO_OVERLAP: "overlap",
    features.NOTHING_VERIFIED: "drafts",
    features.NO_SECOND_MODEL: "draft_model",
    features.NO_ADAPTERS: "adapters",
}

ON_GPU = {
    features.GPU, features.UNCAPTURED_ATTENTION, features.WIDE_ATTENTION, features.TORCH_ADAPTERS,
    features.TORCH_EXPERTS, features.TORCH_STATES, features.TORCH_PRODUCTS, features.NO_CAPTURES,
    features.NO_FP8_PRODUCTS, features.NO_FP8_WEIGHTS,
}  # fmt: skip

CONFLICTS = [Conflict(rule, one, other) for rule in RULES for one, other in product(rule.features, rule.against)]


def packed(directory: Path) -> None:
    save_vision_model(directory)
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": scheme, "format": "pack-quantized"}
    edit_config(
        directory,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
        },
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the directory of a tiny checkpoint of a kind,
    and saves it when it is first asked for."""
    saved: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in saved:
            saved[kind] = tmp_path_factory.mktemp(kind.replace(" ", "_"))
            save = {"vision": save_vision_model, "packed vision": packed}.get(kind)
            save(saved[kind]) if save else save_model(kind, saved[kind])
        return saved[kind]

    return find


def config_with(settings: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted paths into the arguments of EngineConfig."""
    parts: dict[str, dict[str, Any]] = {"": {}, "scheduler": {}, "speculative": {}, "targets": {}, "kv_tiers": {}}
    for path, value in settings.items():
        part, _, name = path.rpartition(".")
        parts[part][name] = value
    scheduler, speculative = SchedulerConfig(**parts["scheduler"]), SpeculativeConfig(**parts["speculative"])
    targets, kv_tiers = Targets(**parts["targets"]), KvTiersConfig(**parts["kv_tiers"])
    return parts[""] | {
        "scheduler": scheduler,
        "speculative": speculative,
        "targets": targets,
        "kv_tiers": kv_tiers,
    }


def start(terms: tuple[Feature, ...], find: Callable[[str], Path]) -> None:
    """Start an engine in which all of these features are on."""
    settings: dict[str, Any] = {}
    for term in terms:
        settings |= BESIDE.get(term, {})
    settings |= {term.setting: VALUES[term] for term in terms if term.setting}
    for term in DRAFTS.keys() & {*terms}:
        settings["speculative.model"] = str(find(DRAFTS[term]))
    asked = config_with(settings)
    model = find(next((KINDS[term] for term in terms if term in KINDS), "llama"))
    if lacking := [LACKS[term] for term in terms if term in LACKS]:
        able = Capabilities(overlap=True, drafts=True, draft_model=True, adapters=object())  # type: ignore[arg-type]
        can = replace(able, **{name: None if name == "adapters" else False for name in lacking})
        check_capabilities(resolved_config(max_num_batched_tokens=512, **asked), can)
    elif ON_GPU & {*terms}:
        device = FakeDevice()
        device.captures = features.NO_CAPTURES not in terms
        device.capability = (8, 0) if features.NO_FP8_PRODUCTS in terms else (9, 0)
        start_on_device(model, EngineConfig(load_format="dummy", **asked), device, "a test")
    elif features.FAKE in terms:
        check_engine("", EngineConfig(**asked))
    else:
        config = EngineConfig(load_format="dummy", **asked)
        start_on_cpu(model, config, (HostDevice(), "a test"), 1).claim.release()


@pytest.mark.parametrize(
    "conflict", CONFLICTS, ids=lambda conflict: " ".join(term.setting or term.title for term in conflict.terms)
)
def test_what_breaks_a_rule_is_refused_by_both_and_the_reason(
    conflict: Conflict, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", FakeFlash())  # type: ignore[arg-type]
    flags = frozenset({"avx2"} if features.NO_BYTES in conflict.terms else {"avx512_vnni"})
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: flags)
    if features.NO_FP8_WEIGHTS in conflict.terms:  # without Triton there would be no products of fp8, either
        pytest.importorskip("triton", reason="Triton has no wheel for this machine")
        monkeypatch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
    with pytest.raises((ConfigError, CheckpointError)) as refused:
        start(conflict.terms, checkpoint)
    text = str(refused.value)
    assert text.endswith(f": {conflict.rule.reason}.")
    for term in conflict.terms:
        if term.setting and term not in DRAFTS and not (DRAFTS.keys() & {*conflict.terms}):
            assert f"{term.setting} is {shown(VALUES[term])}" in text


def test_what_breaks_no_rule_is_not_refused(checkpoint: Callable[[str], Path]) -> None:
    """All models of the test above start when no feature is turned on, so it is the features that are refused."""
    for kind in ("llama", "qwen3_moe", "qwen3_next", "vision"):
        config = EngineConfig(load_format="dummy", kernels="torch_cpu", num_kv_blocks=64)
        start_on_cpu(checkpoint(kind), config, (HostDevice(), "a test"), 1).claim.release()
    for kind in ("llama", "qwen3_moe", "qwen3_next"):
        start_on_device(checkpoint(kind), EngineConfig(load_format="dummy", attention="torch"), FakeDevice(), "a test")
    check_engine("", EngineConfig(executor="fake"))


# --- the table itself ------------------------------------------------------------------------------------------------


def test_a_conflict_is_found_only_where_all_of_a_rule_is_on() -> None:
    on = {features.DRAFTS, features.RECURRENT_STATE}
    assert find_conflict(on) is None
    assert find_conflict(on, feature=features.GPU) is not None
    refused = find_conflict({features.NARROW_KV, features.GPU}, feature=features.DRAFT_MODEL)
    assert refused is not None
    assert refused.feature is features.DRAFT_MODEL
    assert find_conflict({features.NARROW_KV, features.GPU}, feature=features.OVERLAP) is None


def test_every_term_is_a_feature_with_a_setting_or_is_found_out() -> None:
    for term in terms_of(RULES):
        assert bool(term.setting) == (term in VALUES), term.title
        assert term.setting or term.group is not Group.SETTING


def test_reasons_are_clauses_and_each_rule_is_there_once() -> None:
    assert not [rule.reason for rule in RULES if rule.reason.endswith(".") or rule.reason[0].isupper()]
    pairs = Counter((one, other, rule.where) for rule in RULES for one, other in product(rule.features, rule.against))
    assert max(pairs.values()) == 1


# --- nothing is refused beside it ------------------------------------------------------------------------------------

NOT_OF_FEATURES = {
    # a value out of its bounds, or a list of sizes that cannot be used
    "engine/config.py check_bounds": 3,
    "engine/execution/gpu/cuda_graph_buckets.py _checked": 3,
    # two numbers that contradict each other
    "engine/config.py SpeculativeConfig.__post_init__": 2,
    "engine/config.py SchedulerConfig.__post_init__": 1,
    "engine/config.py EngineConfig.__post_init__": 2,
    "engine/config.py _speculative": 1,
    "engine/config.py _check_whole_prompts": 1,
    "engine/build/resolve.py _max_model_len": 1,
    "engine/build/encoder.py with_inputs": 1,
    "engine/build/draft.py check_length": 1,
    "engine/build/step_times.py measured_step_times": 1,
    # another checkpoint than this one's
    "engine/build/draft.py read_draft": 3,
    # more memory than there is
    "engine/models/kv_cache.py blocks_in": 1,
    "engine/build/kv_tiers.py tier_memory": 2,
    "engine/execution/device.py CudaDevice.pin": 1,
    "engine/build/host_fit.py HostBudget.check_use": 1,
    "engine/build/host_fit.py HostBudget.check": 1,
    "engine/build/host_fit.py HostBudget._that_fit": 1,
    "engine/execution/gpu/memory.py check_states_fit": 1,
    "engine/execution/gpu/memory.py check_adapters_fit": 1,
    "engine/execution/gpu/memory.py kv_blocks_that_fit": 1,
    "engine/execution/gpu/memory.py check_blocks_fit": 1,
    "engine/build/batch_invariance.py check_batch_invariance": 1,
    "engine/build/gpu.py GpuStart._load": 1,
    "engine/build/gpu.py GpuStart._attach": 1,
    "engine/build/gpu.py GpuStart._captures_fit": 1,
    "engine/build/gpu.py _fits": 1,
    # what this machine does not have, or a model's shape: found out by trying
    "engine/execution/device.py choose_device": 1,
    "engine/build/cpu.py _kernels": 2,
    "engine/build/gpu.py _attention": 1,
    "engine/build/resolve.py _num_threads": 1,
    # a directory or a key file that cannot be used
    "engine/tiers/cipher.py read_key": 2,
    "engine/tiers/cipher.py _package": 1,
    "engine/tiers/disk.py DiskTier._check_capacity": 1,
    "engine/tiers/private_directory.py private_directory": 2,
    "engine/tiers/private_directory.py directory_key": 1,
    "engine/tiers/private_directory.py refusing_what_cannot_be_written": 1,
    # passes on another refusal, with the name of the model that it concerns
    "engine/build/cpu.py _draft": 1,
    # passes on another refusal, with what the preset has set
    "engine/config.py _with_presets": 1,
    # shapes that cannot be cut, and ranks that do not start
    "engine/models/shards.py _check_heads": 1,
    "engine/models/shards.py _columns": 1,
    "engine/models/shards.py with_experts_of": 1,
    "engine/build/ranks.py _starting": 1,
    "engine/build/rank_fit.py claim_rank": 1,
    "engine/build/rank_fit.py naming": 1,
    "engine/build/lockstep.py start_lockstep": 1,
    "engine/build/lockstep.py _compare": 1,
    "engine/build/executor.py create_executor": 1,
    "engine/build/gpu_ranks.py check_gpu_ranks": 1,
    "engine/build/gpu_ranks.py _gpus_for": 1,
    "engine/build/gpu_follower.py follow_on_gpu": 1,
    # the table
    "engine/config.py refuse_conflicts": 1,
}
"""Every function that refuses a config by itself, how often it does, and why that is no conflict between features."""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the qualified name and node of each function. A function inside another is part of that one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        else:
            yield from functions(node, prefix)


def raised(root: Path, error: str) -> Counter[str]:
    """Count how often each `file function` raises `error`."""
    found: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            raises = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
            calls = [exc for exc in raises if isinstance(exc, ast.Call) and ast.unparse(exc.func).endswith(error)]
            if calls:
                found[f"{path.relative_to(ROOT)} {name}"] = len(calls)
    return found


def test_features_are_refused_by_the_table_alone() -> None:
    """A new refusal is either a rule of engine.features, or of another sort and in the list above."""
    found = raised(ROOT / "engine", "ConfigError") + raised(ROOT / "serve_app", "ConfigError")
    assert found == Counter(NOT_OF_FEATURES)


def test_a_hybrid_model_that_keeps_snapshots_may_have_drafts_of_a_model_without_state(
    checkpoint: Callable[[str], Path],
) -> None:
    """Regression: snapshots are the main model's, but the draft model's kernels were refused because of them."""
    executor, _ = create_executor(
        checkpoint("qwen3_next"),
        EngineConfig(
            device="cpu",
            load_format="dummy",
            num_kv_blocks=16,
            max_num_seqs=2,
            max_num_batched_tokens=40,
            scheduler=SchedulerConfig(state_snapshot_tokens=64, state_snapshots=2),
            speculative=SpeculativeConfig(method="draft_model", model=str(checkpoint("llama"))),
        ),
    )
    executor.shutdown()
