"""Owns the promise about a start's output: few lines where it works, one where it fails, and the rest in a log file.
Never looks at what Ray prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.server import ROOT, SERVE, START_TIMEOUT_S, Server, starting
from tests.support.serve_process import left_of

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def own_temp() -> Iterator[Path]:
    """Use a directory of its own for notes of running servers, so that a test does not see others of this user. Its
    path is short because sockets are below it."""
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))
    yield temp
    shutil.rmtree(temp, ignore_errors=True)


def config_of(args: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"][0]["args"] = args
    config["applications"] += others
    return config


def quiet(own_temp: Path) -> dict[str, str]:
    return {"CHUNKSERVE_VERBOSE": "0", "TMPDIR": str(own_temp)}


def wait_for(server: Server, text: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while text not in server.output and time.monotonic() < deadline:
        assert server.process.poll() is None, server.output
        time.sleep(0.1)
    assert text in server.output


def test_a_start_is_reported_in_few_lines_and_serve_status_finds_it(own_temp: Path) -> None:
    fake = {"model": "m", "engine": {"executor": "fake"}}
    with starting(config_of(fake), quiet(own_temp)) as server:
        wait_for(server, '"messages"')
        lines = server.output.splitlines()
        assert len(lines) <= 10
        assert len(server.output) < 2_000
        for part in (
            "model    m: 4,096 tokens",
            "kernels  executor is fake",
            "KV cache 4,096 blocks hold 65,536 tokens",
        ):
            assert part in server.output
        assert f"{server.url}/v1 is the API, {server.url}/ is a page" in server.output

        found = re.search(r"what Ray and the replicas print: (\S+)", server.output)
        assert found is not None
        assert "ServeReplica:chunkserve:Engine" in Path(found[1]).read_text(errors="replace")

        status = subprocess.run(
            [SERVE, "status"],
            env={**os.environ, **quiet(own_temp)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert status.returncode == 0, status.stderr
        assert yaml.safe_load(status.stdout)["applications"]["chunkserve"]["status"] == "RUNNING"

        assert server.end() == 0
        assert server.output.splitlines()[len(lines) :] == [
            "Shutting down: letting running requests finish. Signal again to stop at once."
        ]


def test_an_application_that_fails_ends_the_command_with_a_line_and_leaves_nothing(own_temp: Path) -> None:
    """Ray's own command prints a traceback, and keeps running beside an application that will never run."""
    other = {"name": "other", "route_prefix": "/other", "import_path": "json:nothing_of_that_name"}
    with starting(config_of({"engine": {"executor": "fake"}}, other), quiet(own_temp)) as server:
        assert server.process.wait(START_TIMEOUT_S) == 1
        _, *lines = server.output.splitlines()
        assert "application other failed to start: AttributeError: " in "\n".join(lines)
        assert "nothing_of_that_name" in server.output
        assert "Traceback" not in server.output
        assert len(lines) <= 4
        assert not left_of(server)


def test_an_engine_that_refuses_to_start_ends_the_command_at_its_first_try(own_temp: Path) -> None:
    (own_temp / "adapter").mkdir()
    args = {"engine": {"max_loras": 1, "kv_cache_memory_gib": 0.1}, "lora_adapters": {"law": str(own_temp / "adapter")}}
    with starting(config_of(args), quiet(own_temp)) as server:
        assert server.process.wait(START_TIMEOUT_S) == 1
        assert re.search(r"application chunkserve failed to start: Engine: .*adapter", server.output), server.output
        assert "Traceback" not in server.output
