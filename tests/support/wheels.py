"""Makes the wheel of this checkout, once for a whole run of the tests: a library for each level takes minutes.
Never installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from loadtest.server import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def built_wheel(factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, with the kernels for each level of processors, unless a worker of this run has."""
    here = factory.getbasetemp()
    shared = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here
    with FileLock(shared / "wheel.lock"):
        if not (shared / "wheel").is_dir():
            temp = shared / "wheel-in-work"
            shutil.rmtree(temp, ignore_errors=True)  # of a worker that was stopped
            source = copy_of_checkout(temp / "source")
            pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(temp / "made"), str(source))
            (temp / "made").rename(shared / "wheel")
    (made,) = (shared / "wheel").glob("*.whl")
    return made


def pip(*words: str, python: str | Path = sys.executable, env: dict[str, str] | None = None) -> str:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def copy_of_checkout(to: Path) -> Path:
    """Copy what git knows or would take: a build writes beside its sources."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to
