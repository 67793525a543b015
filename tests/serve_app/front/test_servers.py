"""`serve status` finds the server that `serve run` runs, and tells this project's arguments from Ray's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.server import ROOT
from serve_app.front import cli
from serve_app.front.arguments import WITH_VALUE, Arguments
from serve_app.front.config_file import ConfigRefused
from serve_app.front.servers import RunningServer, noted, running_servers
from tests.test_architecture import run_python

FIRST = RunningServer("http://127.0.0.1:8000", "http://127.0.0.1:8265", "token")
SECOND = RunningServer("http://127.0.0.1:8001", "http://127.0.0.1:8266", "")

ANOTHER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from serve_app.front.servers import RunningServer, noted
with noted(RunningServer("u", "d", "")):
    print("noted", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("RAY_DASHBOARD_ADDRESS", "RAY_AUTH_MODE"):  # to be restored afterwards, too
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_a_server_is_noted_while_it_runs() -> None:
    with noted(FIRST):
        assert running_servers() == [FIRST]
    assert running_servers() == []


def test_a_note_that_a_full_disk_does_not_take_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with noted(FIRST):
        assert running_servers() == []
    assert "serve status will not find this server: [Errno 28] No space left on device" in caplog.text


def test_a_server_that_was_killed_is_not_noted(own_notes: Path) -> None:
    command = [sys.executable, "-c", ANOTHER, str(own_notes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"noted\n"
        assert [server.url for server in running_servers()] == ["u"]
        other.kill()
    assert running_servers() == []


def test_the_one_that_runs_is_asked_with_the_token_that_it_wants() -> None:
    with noted(FIRST):
        cli._find_server()
    assert (os.environ["RAY_DASHBOARD_ADDRESS"], os.environ["RAY_AUTH_MODE"]) == (FIRST.dashboard, "token")


def test_two_applications_are_one_server() -> None:
    with noted(FIRST), noted(replace(FIRST, url=f"{FIRST.url}/second")):
        cli._find_server()
    assert os.environ["RAY_DASHBOARD_ADDRESS"] == FIRST.dashboard


def test_a_server_that_only_its_handle_reaches_is_listed_as_one() -> None:
    with noted(FIRST), noted(replace(SECOND, url="")), pytest.raises(ConfigRefused) as refused:
        cli._find_server()
    assert f"{SECOND.dashboard} (no address)" in str(refused.value)


def test_with_several_servers_none_is_guessed() -> None:
    with (
        noted(FIRST),
        noted(SECOND),
        pytest.raises(ConfigRefused, match="2 servers run here; choose one with"),
    ):
        cli._find_server()
    assert "RAY_DASHBOARD_ADDRESS" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "wants"),
    [("status", True), ("shutdown -y", True), ("status -a x", False), ("status --address=x", False), ("run c", False)],
)
def test_only_commands_that_ask_a_server_and_do_not_say_which_look_for_one(arguments: str, wants: bool) -> None:
    assert Arguments.read(arguments.split(), {}).wants_a_server is wants


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ("run c.yaml", "c.yaml"),
        ("run --address local c.yml", "c.yml"),
        ("run --runtime-env r.yaml --reload c.yaml", "c.yaml"),
        ("run --runtime-env=r.yaml c.yaml", "c.yaml"),
        ("run -d app.yaml --blocking c.yaml x=1", "c.yaml"),
        ("run a.b:c model=x.yaml", None),
        ("run c.yaml --help", None),
        ("deploy c.yaml", None),
        ("", None),
    ],
)
def test_the_config_is_told_from_the_values_of_options(arguments: str, config: str | None) -> None:
    assert Arguments.read(arguments.split(), {}).config == (None if config is None else Path(config))


def test_verbose_is_ours_in_a_run_alone() -> None:
    ours = Arguments.read(["run", "--verbose", "c.yaml"], {})
    assert (ours.of_ray, ours.verbose) == (["run", "c.yaml"], True)
    assert Arguments.read(["run", "c.yaml"], {"CHUNKSERVE_VERBOSE": "1"}).verbose
    assert Arguments.read(["status", "--verbose"], {}).of_ray == ["status", "--verbose"]


def test_the_options_with_a_value_are_those_of_ray() -> None:
    """It runs in another process, because this one may not import ray.serve before a test has set its environment."""
    code = """
import click, json
from ray.serve.scripts import run
options = [of for of in run.params if isinstance(of, click.Option) and not of.is_flag]
print(json.dumps(sorted(name for of in options for name in of.opts)))
"""
    assert json.loads(run_python(code)) == sorted(WITH_VALUE)
