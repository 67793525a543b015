"""Owns how kernels are launched: compiled or interpreted, in which configuration, and in what sizes.
Never computes, and never waits for a device except while configurations are timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

OLDEST = (3, 6)
"""The oldest Triton version that the kernels were compiled with; pyproject.toml's extra `cuda` requires it, too."""

# Checked before using what older versions of triton.knobs and autotune lack: torch 2.4 brings Triton 3.0.
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"Triton is {triton.__version__}, and the kernels need {OLDEST[0]}.{OLDEST[1]}")

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on any tensors (TRITON_INTERPRET=1 was set when it was imported)."""

# The interpreter stores bfloat16 as its bits, and would multiply those: it takes these products in float32.
WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, total):
    """total + a b, accumulated in float32; float32 inputs never become tf32. a: [m, k], b: [k, n], total: [m, n]"""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def split_dot(a, b, total):
    """total + a b in float32, by three products of tf32 parts, which is about as accurate and uses tensor cores.

    Several float32 products by `dot`, whose threads multiply one by one, do not fit in a program's registers.
    """
    return tl.dot(a, b, total, input_precision="tf32x3")


TUNING = "CHUNKSERVE_TRITON_TUNING"
"""`keep` (the default): configurations are timed once, and the choice is kept on disk for all processes. `forget`:
they are timed in each process; a benchmark needs this, or its first shapes would choose for engines. A number: the
configuration with that index, or the last, untimed; where it does not fit the device, the next one that does."""
KEEP, FORGET = "keep", "forget"


WARM_UP_MS, RUN_MS = 5, 20
"""How long a configuration runs before it is timed, and while it is."""


def tuned(configs: Sequence[triton.Config], key: Sequence[str], tuning: str | None = None) -> Callable[[Any], Any]:
    """Autotune a kernel: take the fastest of `configs` for each combination of the arguments in `key`, and remember it.

    The first call of each combination times them, and waits for the device: make it before a CUDA graph is captured.
    The interpreter takes the first. No key may be a number of rows or a length: these change from step to step.
    tuning: a value of TUNING; None: the environment variable's.

    Raises:
        ValueError: `tuning` is neither `keep`, `forget` nor a number.
    """
    how = os.environ.get(TUNING, KEEP) if tuning is None else tuning
    options: dict[str, Any] = {"configs": candidates(configs, how), "key": list(key), "cache_results": how == KEEP}
    if INTERPRETED:
        options["configs"] = list(configs[:1])

    def decorate(kernel: Any) -> Any:
        if not INTERPRETED:
            options["do_bench"] = _briefly
            if how not in (KEEP, FORGET):
                options["prune_configs_by"] = {"early_config_prune": partial(first_that_fits, kernel)}
                options["do_bench"] = _untimed
        return triton.autotune(**options)(kernel)

    return decorate


def fixed(configs: Sequence[triton.Config], key: Sequence[str]) -> Callable[[Any], Any]:
    """Take the first of `configs` that fits the device, untimed: the same on all GPUs of a kind, for sums whose order
    may depend on nothing else. Launch with NO_FUSION, or the compiler chooses which products and sums are rounded as
    one. key: as `tuned`'s."""
    return tuned(configs, key, tuning="0")


NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}
"""The option of such a launch. Without it a kernel compiled for other constants may differ in the last bit."""


def candidates(configs: Sequence[triton.Config], tuning: str) -> list[triton.Config]:
    """Return the configurations to time or, if `tuning` is a number, to try in that order until one fits."""
    if tuning in (KEEP, FORGET):
        return list(configs)
    if not tuning.isdecimal():
        raise ValueError(f"{TUNING} is {tuning!r}: expected {KEEP}, {FORGET} or the number of a configuration.")
    number = min(int(tuning), len(configs) - 1)
    return [*configs[number:], *configs[:number]]


def first_that_fits(
    kernel: Any, configs: Sequence[triton.Config], arguments: dict[str, Any], **options: Any
) -> list[triton.Config]:
    """Compile a kernel in one configuration after another, and return the first that the device takes, alone.

    If it takes none, the last is returned, and its launch raises. Nothing is launched here: a kernel may add to what
    it writes. arguments: those given by place. options: all others, and those of the launch.
    """
    for config in configs:
        given = {**options, **config.all_kwargs(), "warmup": True}
        try:
            # A compiled kernel with a grid is loaded, which compares what it needs with what the device has.
            _ = kernel.run(*arguments.values(), **given)[(1, 1, 1)]
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
            continue
        return [config]
    return list(configs[-1:])


def _briefly(launch: Callable[[], None], quantiles: Sequence[float]) -> Sequence[float]:
    """Time a launch for a fifth of what Triton takes: some hundred shapes and configurations are timed at a start."""
    times: Sequence[float] = driver.active.get_benchmarker()(launch, quantiles=quantiles, warmup=WARM_UP_MS, rep=RUN_MS)
    return times


def _untimed(_launch: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """Take the place of a benchmark where there is nothing to choose."""
    return [0.0] * len(quantiles)


WITHOUT_GPU = 4
"""Multiprocessors where there is none: so few that programs have several items each in the interpreter, too."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    if device.type != "cuda":
        return WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def padded(size: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`: tiles need one."""
    return max(least, 1 << (size - 1).bit_length())


def warps(elements: int) -> int:
    """Return the warps for a program that passes over `elements` once: 1 to 16, eight elements per thread."""
    return min(max(padded(elements) // 256, 1), 16)
