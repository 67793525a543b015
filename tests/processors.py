"""Owns the run of tests whose results depend on the processor, as other processors would run them:
`python -m tests.processors`.
Never asks for instructions that this processor lacks: settings only take away, and any x86-64 with AVX2 can do them."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "AVX2": {
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "CXX": "g++ -mno-avx512f",
    },
    "AMD, and torch without vectors": {
        "OPENBLAS_CORETYPE": "Zen",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_CBWR": "COMPATIBLE",
        "CXX": "g++ -mno-avx512bf16 -mno-amx-tile",
    },
}
"""Each sets, in this order: NumPy's BLAS, with which Triton's interpreter multiplies; torch's own loops; oneDNN and
MKL, which multiply for torch; the compiler of the native kernels."""

FILES = (
    "tests/kernels/triton/test_experts.py",
    "tests/kernels/triton/test_attention.py",
    "tests/kernels/triton/test_attention_work.py",
    "tests/kernels/triton/test_few_rows.py",
    "tests/kernels/triton/test_forward.py",
    "tests/kernels/triton/test_fp8.py",
    "tests/kernels/triton/test_linear.py",
    "tests/kernels/triton/test_linear_attention.py",
    "tests/kernels/triton/test_low_rank.py",
    "tests/kernels/triton/test_narrow_experts.py",
    "tests/kernels/triton/test_narrow_kv.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/kernels/cpu/test_elementwise.py",
    "tests/kernels/test_flash.py",
    "tests/kernels/cpu/test_linear_attention.py",
    "tests/engine/execution/test_executor.py",
    "tests/engine/checkpoints/test_gguf_convert.py",
    "tests/engine/models/test_fp8_rows.py",
    "tests/engine/models/test_native.py",
    "tests/engine/models/test_native_adapters.py",
    "tests/engine/models/test_native_encoding.py",
    "tests/engine/models/test_native_hybrids.py",
    "tests/engine/models/test_packed_weights.py",
    "tests/engine/models/test_recurrent_state.py",
    "tests/engine/execution/gpu/test_adapters.py",
    "tests/engine/execution/gpu/test_narrow.py",
    "tests/engine/execution/gpu/test_narrow_kv.py",
    "tests/engine/execution/gpu/test_triton.py",
    "tests/engine/models/test_vision_family.py",
    "tests/golden/test_adapters.py",
    "tests/golden/test_families.py",
    "tests/golden/test_vision.py",
)
"""The tests that compare bits of what a library multiplied, or greedy texts with those of transformers."""


def run(name: str, options: Sequence[str]) -> int:
    shown = " ".join(f'{key}="{value}"' for key, value in SETTINGS[name].items())
    print(f"--- {name}: {shown}", flush=True)
    started, environment = time.monotonic(), {**os.environ, **SETTINGS[name]}
    # Once and with all cores: each worker that needs the native kernels would compile them, all at the same time.
    subprocess.run([sys.executable, "-m", "kernels.cpu.native.library"], env=environment, check=False)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options, *FILES]
    status = subprocess.run(command, env=environment, check=False).returncode
    print(f"--- {name}: {'failed' if status else 'passed'} after {time.monotonic() - started:.0f} s", flush=True)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every setting, also when an earlier one failed."""
    parser = argparse.ArgumentParser(description="Run the tests that compare bits as other processors would.")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="pytest's own")
    options = parser.parse_args(arguments).options
    if platform.machine() != "x86_64":
        print(f"nothing to run: the settings are of x86-64, and this is {platform.machine()}")
        return 0
    return max([run(name, options) for name in SETTINGS])


if __name__ == "__main__":
    sys.exit(main())
