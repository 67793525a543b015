"""Owns which Triton kernels there are, and the record of the sources that were compiled in every configuration and for
every kind of GPU: `python -m tests.kernels.triton.every_kernel` does so, and writes it.
Never needs a GPU: Triton brings the assembler."""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.kernels.triton.compiled import FP8_CAPABILITY
from tests.kernels.triton.resources import compile_for

RECORD = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[3]
SOURCES = ("kernels/triton/**/*.py", "kernels/rows/**/*.py", "kernels/*.py", "tests/kernels/triton/compiled.py")
"""All that a compiled kernel is made of, but for Triton itself."""

EVERY = {
    "_norm", "_silu_and_mul", "_rotate", "_write", "_sum_items", "attend", "_combine", "_copy", "_edit", "_look",
    "_limit", "scan_block", "filter_row", "sample_row", "_logprobs", "_convolve", "_one_step", "_invert", "_scan",
    "_gated_norm", "_sigmoid_gate", "_router_logits", "_choose", "_sort", "gate_up", "down", "gather_inputs",
    "add_parts", "_shrink", "_expand", "multiply", "add_splits", "few_rows", "few_rows_gated", "many_rows",
}  # fmt: skip
FROM_8_9 = {"round_rows", "multiply_fp8"}
"""The kernels that only GPUs with products of fp8 have."""

_OTHERS = ("8.0", "10.0", "12.0")
_SHAPES = ("--head-dims", "80", "256", "--groups", "8")
RUNS = {
    "every configuration": (("9.0", *_SHAPES), ("9.0", "--dtypes", "float32", "float16", "--first-config")),
    **{f"the first for {capability}": ((capability, *_SHAPES, "--first-config"),) for capability in _OTHERS},
}
"""What is compiled, in calls of `compile_all`. Autotuning skips what needs more shared memory than a GPU has."""


def every(capability: str) -> set[str]:
    return EVERY | FROM_8_9 if float(capability) >= FP8_CAPABILITY else EVERY


def compile_all(cache: Path, capability: str, *arguments: str) -> list[dict[str, Any]]:
    """Compile all kernels, and return what is known of each."""
    found = compile_for(capability, str(cache), *arguments)
    assert {kernel["name"] for kernel in found} == every(capability)
    return found


def sources() -> dict[str, str]:
    """Return what the kernels are made of now: Triton's version, and a digest of the sources."""
    import triton

    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return {"triton": triton.__version__, "sources": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.triton.every_kernel",
        description="Compile every Triton kernel in every configuration, and its first one for every kind of GPU, and "
        "record of which sources (20 minutes). Tests leave out what is recorded.",
    )
    parser.parse_args()
    made = sources()
    with tempfile.TemporaryDirectory() as cache:
        for name, runs in RUNS.items():
            for capability, *arguments in runs:
                found = compile_all(Path(cache), capability, *arguments)
                print(f"{name}: {len(found)} kernels for {capability}", flush=True)
    RECORD.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
