"""Owns the contract of `.ci/run`: each stage is announced, all of them run, and the end says which failed, and why.
Never runs a real stage: `make` is a script that prints what it is told to."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from loadtest.server import ROOT

STAGES = ["browser", "compiler", "check", "validate-k8s", "test", "test-processors", "test-chaos-short", "test-slow"]
FAILURE = "FAILED tests/test_sums.py::test_one_and_one - AssertionError: assert 3 == 2"


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a folder with nothing but `.ci/run`, and programs that succeed at once."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name in ("bin/chromium", "bin/g++", "bin/make", ".venv/bin/python"):
        script(tmp_path / name, "exit 0")
    return tmp_path


def run(checkout: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(checkout / ".ci" / "run")]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def test_each_stage_is_announced_and_timed_and_all_pass(checkout: Path) -> None:
    done = run(checkout)
    assert done.returncode == 0
    began = [line.split()[1] for line in done.stdout.splitlines() if " begins: " in line]
    assert began == STAGES
    summary = done.stdout.split("=== summary: ")[1].splitlines()[1:]
    assert [line.split()[0] for line in summary] == STAGES
    assert {line.split()[1] for line in summary} == {"passed"}
    assert all(line.split()[2].isdigit() and line.endswith(" s") for line in summary)


def test_a_failing_test_ends_the_output_and_the_stages_after_it_have_run(checkout: Path) -> None:
    script(checkout / "bin/make", f'[ "$1" != test ] || {{ echo "{FAILURE}"; echo "1 failed"; exit 2; }}')
    done = run(checkout)
    assert done.returncode == 1
    assert "=== test-slow passed" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["test failed:", FAILURE]


def test_a_stage_that_fails_without_a_test_ends_the_output_with_its_last_lines(checkout: Path) -> None:
    script(checkout / "bin/make", '[ "$1" != check ] || { echo "error: a type is missing" >&2; exit 2; }')
    done = run(checkout)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["check failed:", "error: a type is missing"]


def test_without_a_compiler_the_run_fails(checkout: Path) -> None:
    (checkout / "bin/g++").unlink()
    for name in ("bash", "dirname", "mktemp", "rm", "tee", "grep", "tail", "id"):
        (checkout / "bin" / name).symlink_to(shutil.which(name) or "")
    env = {**os.environ, "PATH": str(checkout / "bin")}
    command = [str(checkout / "bin" / "bash"), str(checkout / ".ci" / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 1
    assert "no g++: the native kernels would go untested" in done.stdout.split("=== summary: ")[1]
