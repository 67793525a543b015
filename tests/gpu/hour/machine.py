"""Owns the description of the machine: versions, the device's properties, its peaks, and a memory checker's verdict.
Never judges them."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.kernels import Bench, peaks
from tests.gpu.hour.phases import SANITIZED, STAND_IN, environment_of_tests

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "pytest", "llguidance", "ray",
            "flash_attn", "flash_attn_interface", "vllm_flash_attn")  # fmt: skip
CHECKER = "compute-sanitizer"


def describe(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "checker": shutil.which(CHECKER),
    }
    rehearsal = options.device == STAND_IN
    if not rehearsal:
        found["device"] = {
            name: getattr(torch.cuda.get_device_properties(0), name, None)
            for name in ("name", "total_memory", "multi_processor_count", "L2_cache_size", "major", "minor")
        }
    keep(found)
    sizes = {"copy_mib": 1, "matrix": 32, "runs": 3} if rehearsal else {"copy_mib": 2048, "matrix": 8192, "runs": 20}
    where = torch.device("cpu" if rehearsal else "cuda")
    bench = Bench(argparse.Namespace(**sizes), where, torch.bfloat16, torch.Generator(where).manual_seed(5))
    with torch.inference_mode():
        found["peaks"] = peaks(bench)
    keep(found)
    print(found, flush=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def memcheck(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run six tiny cases under NVIDIA's memory checker, each tensor in an allocation of its own."""
    if options.device == STAND_IN or shutil.which(CHECKER) is None:
        keep({"missing": f"no {CHECKER} on this machine" if options.device != STAND_IN else "no GPU to check"})
        return
    report = f"{options.result}.tests"
    places = {"{result}": report, "{copy}/{copies}": ""}
    environment = {name: places.get(value, value) for name, value in environment_of_tests(options.device).items()}
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "tests/gpu/test_kernels.py",
    ]
    done = subprocess.run(
        [CHECKER, "--tool", "memcheck", "--error-exitcode", "9", *tests, "-k", SANITIZED],
        env=os.environ | environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    print(said, flush=True)
    if "Device not supported" in said:
        keep({"missing": f"{CHECKER}: Device not supported"})
        return
    keep({"status": done.returncode, "said": said[-4000:]})
    sys.exit(done.returncode)
