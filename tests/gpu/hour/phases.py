"""Owns what the hour does, in order: the parts of each phase, their limits, and what a rehearsal has instead.
Never runs one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tests.gpu.hour.running import Part

CUDA, STAND_IN = "cuda", "stand-in"
LARGE, SMALL = "llama-3.1-8b", "qwen3-0.6b"
OVER_NARROW = " over K and V in "
"""Between an attention's name and a type of 8 bits, in a cell's `by`."""
NARROW_SHAPES = ("decode 64 x 8192", "decode 256 x 1024")
"""Where attention over such K and V is timed: they are most of what is read, and enough for every multiprocessor."""
MOST_SHARDS = 16
SANITIZED = (
    "test_the_norm_with_its_residual[576-dtype0] or test_silu_and_mul[1536-dtype0] or test_cache_writes_alone[dtype0] "
    "or test_attention_in_blocks_of_any_size[64] or test_rotation_and_cache_writes[65-64-False-dtype0] "
    "or test_logprobs_are_the_engines[1-dtype0]"
)
"""The tiny cases that a memory checker watches."""
CHEAP = "test_silu_and_mul or test_cache_writes_alone or (test_a_backend_agrees and one-token)"
"""The kernel tests of a rehearsal: the interpreter takes milliseconds for each tile."""
FEW = "captured_steps_give and attention0 or step_in_flight and torch or greedy_answers"
"""The engine tests of a rehearsal."""
KERNELS = [
    f"tests/gpu/test_{name}.py"
    for name in (
        "attention",
        "kernels",
        "experts",
        "linear",
        "linear_attention",
        "low_rank",
        "tuning",
        "batch_invariance",
    )
]
ENGINE, ADAPTERS, TIERS, TRANSFORMERS = (
    f"tests/gpu/test_{name}.py" for name in ("engine", "adapters", "kv_tiers", "transformers")
)


@dataclass(frozen=True)
class Phase:
    name: str
    title: str
    minutes: float
    """Its share of the hour, scaled by --minutes."""
    parts: Sequence[Part]


def phases(device: str, again: str | None = None) -> list[Phase]:
    """Return all phases. again: a part that the last phase runs once more.

    Raises:
        ValueError: there is no such part.
    """
    right = Phase("right", "Is it right?", 8, _right(device))
    where = Phase("where", "Where is the time?", 9, _where(device))
    aims = Phase("aims", "Are the aims met?", 9, _aims(device))
    known = {part.name: part for phase in (right, where, aims) for part in phase.parts}
    if again is not None and again not in known:
        raise ValueError(f"--again is {again!r}: expected one of {', '.join(known)}.")
    rest = Phase("rest", "Once more", 4, [] if again is None else [known[again]])
    return [right, where, aims, rest]


def _own(device: str, name: str, limit_s: float, *arguments: str) -> Part:
    """Return a part that tests.gpu.hour.part runs."""
    command = [sys.executable, "-m", "tests.gpu.hour.part", name, "--device", device, "--result", "{result}"]
    return Part(name, limit_s, [*command, *arguments], _environment(device))


def _environment(device: str) -> dict[str, str]:
    """Return a part's variables. Parts share compiled kernels, but leave no choice of configurations to engines."""
    hidden = {} if device == CUDA else {"CUDA_VISIBLE_DEVICES": ""}
    return {"CHUNKSERVE_TRITON_TUNING": "forget", "PYTHONUNBUFFERED": "1", **hidden}


def _tests(
    device: str,
    name: str,
    limit_s: float,
    files: Sequence[str],
    select: str,
    copies: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Part:
    """Return a pytest run without installed plugins, whose warnings are not errors: that mix of versions is unknown."""
    quiet = ["-p", "no:cacheprovider", "-W", "default", "-q", "--tb=short"]
    stand_in = [] if device == CUDA else ["-p", "tests.support.gpu_stand_in"]
    chosen = ["-k", select] if select else []
    command = [sys.executable, "-m", "pytest", *quiet, *stand_in, *chosen, *files]
    return Part(name, limit_s, command, {**environment_of_tests(device), **environment}, copies)


def environment_of_tests(device: str) -> dict[str, str]:
    """Return variables for a pytest run that keeps its report as a part's result."""
    required = {"CHUNKSERVE_REQUIRE_GPU": "1"} if device == CUDA else {}
    return {
        **_environment(device),
        "CHUNKSERVE_TRITON_TUNING": "0",
        "CHUNKSERVE_GPU_REPORT": "{result}",
        "CHUNKSERVE_GPU_SHARD": "{copy}/{copies}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **required,
    }


def _right(device: str) -> list[Part]:
    """Return the first phase's parts. A rehearsal interprets a few Triton kernels and runs an engine without Triton."""
    first, memcheck = [_own(device, "machine", 60), _own(device, "precompile", 150)], _own(device, "memcheck", 120)
    if device == STAND_IN:
        interpreted = {"TRITON_INTERPRET": "1", "STAND_IN_TRITON": "1"}
        return [
            *first,
            _tests(device, "kernels", 240, KERNELS[:2], CHEAP, environment=interpreted),
            _tests(device, "tiers", 60, [TIERS], ""),
            _tests(device, "engine", 240, [TRANSFORMERS, ENGINE], FEW),
            _tests(device, "cancels", 150, [ENGINE], "thousand and True", environment={"STAND_IN_CANCELS": "20"}),
            memcheck,
        ]
    cores, shards = os.cpu_count() or 1, _shards(device)
    threads = {"OMP_NUM_THREADS": str(cores // shards)}  # the references' too, or each process would take every core
    return [
        *first,
        _tests(device, "kernels", 240, KERNELS, "", shards, threads),
        _tests(device, "tiers", 60, [TIERS], ""),
        _tests(device, "engine", 240, [TRANSFORMERS, ENGINE, ADAPTERS], "not thousand"),
        _tests(device, "cancels", 150, [ENGINE], "thousand"),
        memcheck,
    ]


def _shards(device: str) -> int:
    """Return how many processes share work that is compilation."""
    return min(MOST_SHARDS, os.cpu_count() or 1) if device == CUDA else 1


def _where(device: str) -> list[Part]:
    limits = {"tuning": 120, "profile": 200, "attention": 150}
    compiled = _own(device, "operations-ahead", 90, "--share", "{copy}/{copies}")
    return [
        *(_own(device, name, limit_s) for name, limit_s in limits.items()),
        replace(compiled, copies=_shards(device)),
        _own(device, "operations", 120),
    ]


def _aims(device: str) -> list[Part]:
    def engine(name: str, limit_s: float, model: str, *loads: str) -> Part:
        return _own(device, name, limit_s, "--model", model, "--loads", *loads)

    # Without Triton, as in a rehearsal, no engine is batch-invariant.
    invariant = [_own(device, "batch-invariant", 150, "--model", LARGE, "--loads", "steps", "--batch-invariant")]
    return [
        engine("steps", 240, LARGE, "steps", "mixed_load"),  # on one engine: an 8B model takes its time to start
        engine("loop", 120, LARGE, "host_gap", "throughput"),
        engine("small-model", 90, SMALL, "steps", "host_gap"),
        _own(device, "packages", 60),
        engine("owner-by-graphs", 150, LARGE, "owner_by_graphs"),
        engine("transformers", 90, LARGE, "transformers"),
        *(invariant if device == CUDA else []),
    ]
