"""Owns compilation of what the hour launches, on a machine without a GPU, into TRITON_CACHE_DIR: a card's machine whose
Triton is of the same wheel takes it from there. Never launches a kernel: a test that has this as a plugin fails."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Before kernels are imported: engines must find no choice here that no GPU has timed.
os.environ.setdefault("CHUNKSERVE_TRITON_TUNING", "forget")
os.environ["STAND_IN_TRITON"] = "1"

import torch
from triton.runtime import driver

from tests.gpu.hour.compiling import EXPERTS
from tests.gpu.hour.engines import started
from tests.gpu.hour.phases import CUDA, LARGE, SMALL
from tests.kernels.triton import compiled
from tests.support import gpu_stand_in  # noqa: F401

CAPABILITY = "CHUNKSERVE_GPU_AHEAD"
"""The compute capability to compile for, such as 9.0 (the default)."""
SIZES: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_kv_blocks": 1024}


def _zeros(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What no kernel fills must still be a valid token or index to torch's own operators."""
    return lambda *sizes, **options: make(*sizes, **options).zero_()


def compile_only(capability: str) -> list[dict[str, Any]]:
    """Let this process compile what it launches from now on; return what it has compiled, which grows."""
    major, minor = (int(part) for part in capability.split("."))
    found: list[dict[str, Any]] = []
    driver.set_active(compiled.NoGpu(10 * major + minor))
    compiled.compile_instead(found, resources=False)
    torch.cuda.get_device_capability = lambda *_: (major, minor)  # type: ignore[assignment]
    torch.empty, torch.empty_like = _zeros(torch.empty), _zeros(torch.empty_like)
    torch.Tensor.new_empty = _zeros(torch.Tensor.new_empty)  # type: ignore[method-assign,assignment]
    return found


FOUND = compile_only(os.environ.get(CAPABILITY, "9.0"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.hour.ahead",
        description="Compile what engines of the first hour launch, without a GPU, into TRITON_CACHE_DIR. Takes some "
        f"minutes. {CAPABILITY}=8.0 compiles for another GPU. Carry the folder to a machine with the same wheel of "
        "Triton. Triton finds a kernel there only if TRITON_CACHE_DIR has the same value as here.",
    )
    parser.add_argument("--shapes", nargs="+", default=[LARGE, SMALL, EXPERTS], help="shapes of models (%(default)s)")
    parser.add_argument("--batch-invariant", action="store_true", help="such engines, too")
    options = parser.parse_args(arguments)
    if not os.environ.get("TRITON_CACHE_DIR"):
        parser.error("TRITON_CACHE_DIR is not set: name a folder")
    settings: dict[str, Any] = {"layers": 1, "attention": "triton", "cuda_graphs": "none", **SIZES}
    for shape in options.shapes:
        for invariant in (False, True) if options.batch_invariant else (False,):
            with started(CUDA, shape, batch_invariant=invariant, **settings):
                print(f"{shape}: {len(FOUND)} launches compiled so far", flush=True)


if __name__ == "__main__":
    sys.exit(main())
