"""`chunkserve bench` and `plan` work where only what a wheel has is installed, in any directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from loadtest.server import ROOT
from loadtest.slo import PASSED
from tests.loadtest.fake_openai import FakeServer, listening
from tests.loadtest.loads import LENIENT, LONGEST_S

pytestmark = [pytest.mark.anyio, pytest.mark.server]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the modules of the wheel's packages, as `packages` in pyproject.toml lists them."""
    folder = tmp_path_factory.mktemp("site-packages")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for package in listed:
        path = package.replace(".", "/")
        (folder / path).mkdir(parents=True, exist_ok=True)
        for module in (ROOT / path).glob("*.py"):
            shutil.copy(module, folder / path)
    return folder


async def chunkserve(installed: Path, cwd: Path, *words: str) -> tuple[int | None, str]:
    """Run the command there; return its status, and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "serve_app.front.command", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    async with asyncio.timeout(LONGEST_S):
        told, _ = await process.communicate()
    return process.returncode, told.decode()


async def test_a_load_is_sent_from_a_directory_with_a_folder_of_the_packages_name(
    installed: Path, tmp_path: Path
) -> None:
    """`python -m locust` would take the user's own `loadtest` for the package."""
    (tmp_path / "loadtest").mkdir()
    (tmp_path / "loadtest" / "__init__.py").write_text("raise ImportError('this is the user\\'s')")
    async with listening(FakeServer()) as port:
        words = ("--seconds", "1", "--rate", "8", "--seed", "1", *LENIENT)
        status, told = await chunkserve(installed, tmp_path, "bench", f"http://127.0.0.1:{port}", *words)
    assert status == PASSED, told
    assert "passed" in told


@pytest.mark.slow
async def test_a_plan_is_made_in_processes_of_its_own(installed: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    shutil.copy(ROOT / "loadtest" / "results" / "step_model.json", steps)
    load = ("--rate", "1", "--prompt-tokens", "100", "--answer-tokens", "15", "--ttft-ms", "2000")
    few = ("--seconds", "10", "--seeds", "1", "--processes", "2")
    status, told = await chunkserve(installed, tmp_path, "plan", *load, "--steps", "steps.json", *few)
    assert status == 0, told
    assert "What to set" in told
