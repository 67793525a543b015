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
ENGINE = """
from engine.build.executor import create_executor
from engine.config import EngineConfig, KvTiersConfig
from engine.execution.gpu.executor import DeviceExecutor
from tests.support.gpu_stand_in import tiny_shape

sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_kv_blocks": 8}
tiers = KvTiersConfig(host_memory_gib=0.001)
config = EngineConfig(load_format="dummy", device="cuda", kv_tiers=tiers, **sizes)
executor, _ = create_executor(tiny_shape("qwen3-0.6b", vocab_size=272), config)
assert isinstance(executor, DeviceExecutor)
executor.shutdown()
"""
"""What chooses a GPU is imported when it is chosen."""


@pytest.mark.parametrize(
    ("modules", "then"),
    [
        (["benchmarks.kernels", "benchmarks.engine.gpu", "engine.build.executor"], ""),
        (["tests.conftest", *TESTS], ""),
        (["tests.support.gpu_stand_in"], ENGINE),
    ],
    ids=["benchmarks", "tests", "an engine on a stand-in"],
)
def test_what_runs_on_a_gpus_machine_imports_without_the_servers_packages(modules: list[str], then: str) -> None:
    """One import error ended the benchmarks of the engine, and the collection of all tests of a GPU. Another would have
    ended the start of every engine."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(absent=ABSENT, modules=modules) + then],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "STAND_IN_SHAPES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
