"""A newcomer's walk: a fresh clone, a new virtual environment, an empty model cache, `make serve`.
Never runs README's other command, `make test`, of which it is part: `.ci/run` does so, on such a clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from loadtest.server import ROOT, ended, free_port

pytestmark = pytest.mark.server

START_TIMEOUT_S = 900  # installs everything


@pytest.fixture(scope="module")
def clone() -> Iterator[Path]:
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(temp / "clone")], check=True)
    yield temp / "clone"
    shutil.rmtree(temp, ignore_errors=True)


def newcomers_env(clone: Path) -> dict[str, str]:
    """Return this process's environment without anything of the virtual environment it runs in."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTEST", "MAKE"))}
    env.pop("MFLAGS", None)
    own_bin = str(ROOT / ".venv" / "bin")
    env["PATH"] = os.pathsep.join(part for part in env["PATH"].split(os.pathsep) if part != own_bin)
    return {**env, "CHUNKSERVE_CACHE": str(clone.parent / "cache"), "RAY_TMPDIR": str(clone.parent / "r")}


def wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(errors="replace"), re.DOTALL):
            return found
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace"))


@pytest.mark.slow
def test_make_serve_installs_prepares_serves_and_says_how_to_call_it(clone: Path) -> None:
    config = yaml.safe_load((clone / "config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    (clone.parent / "config.yaml").write_text(yaml.safe_dump(config))
    log = clone.parent / "serve.log"
    (clone.parent / "r").mkdir()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["make", "serve", f"CONFIG={clone.parent / 'config.yaml'}"],
            cwd=clone,
            env=newcomers_env(clone),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ended(process):
        call = wait_for(log, r"chunkserve is ready.*?(curl .*?\}\]\}')", process).group(1)
        answer = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=120, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
        process.wait(120)
        assert "letting running requests finish" in log.read_text(errors="replace")
