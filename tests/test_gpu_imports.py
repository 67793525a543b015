"""Owns that what runs on a GPU's machine imports there, where the server's packages are not installed.
Never asks for a GPU: the packages are hidden from a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = (
    "ray", "starlette", "pydantic", "zmq", "msgspec", "h11", "cryptography", "locust", "gguf", "llguidance",
    "jsonschema", "openai", "httpx", "schemathesis", "hypothesis", "opentelemetry", "xdist", "flash_attn",
    "vllm_flash_attn",
)  # fmt: skip
"""Packages of ours that a machine with torch, Triton, transformers and pytest need not have."""
TESTS = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "tests/gpu").rglob("*.py"))
CODE = """
import importlib, sys
for name in {absent!r}:
    sys.modules[name] = None
for name in {modules!r}:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "modules",
    [
        ["benchmarks.kernels", "benchmarks.engine.gpu", "engine.build.executor"],
        ["tests.conftest", *TESTS],
        ["tests.support.gpu_stand_in"],
    ],
    ids=["benchmarks", "tests", "stand-in"],
)
def test_what_runs_on_a_gpus_machine_imports_without_the_servers_packages(modules: list[str]) -> None:
    """One import error ended the benchmarks of the engine, and the collection of all tests of a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(absent=ABSENT, modules=modules)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "STAND_IN_SHAPES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
