"""This project's `serve run`, with Ray Serve's part of it stubbed:
what it prints, what is fatal, and what is then taken down."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts

from loadtest.server import ROOT
from serve_app.engines.versions import EngineFacts, EngineVersion
from serve_app.front import cli, shutdown
from serve_app.front import run as running
from serve_app.front.arguments import Arguments
from serve_app.front.config_file import read_config
from serve_app.front.console import Console
from serve_app.front.output import OutputLost
from serve_app.front.preflight import read_applications
from serve_app.front.run import Launch
from serve_app.front.start import StartFailed, in_a_line
from serve_app.replicas.deployment import EngineReplica
from tests.support.engines import resolved_config

ARGS = {"engine": {"executor": "fake"}}
THEIRS = {"name": "theirs", "route_prefix": "/t", "import_path": "their.app:build"}
NOT_ANSWERED = StartFailed("http://x/health is not answered by this server")


class Said(Console):
    """Keeps the lines instead of printing them on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Cluster:
    """The applications that Serve runs, and what was done to it."""

    def __init__(self, **statuses: str) -> None:
        self.statuses, self.done = statuses, list[str]()

    def status(self) -> Any:
        each = {
            name: SimpleNamespace(status=status, message="it broke", deployments={})
            for name, status in self.statuses.items()
        }
        return SimpleNamespace(applications=each)

    def delete(self, name: str) -> None:
        self.done.append(f"delete {name}")

    def shutdown(self) -> None:
        self.done.append("shutdown")


def launch(tmp_path: Path, own_cluster: bool, prefix: str | None = "/", **top: Any) -> Launch:
    ours = {"name": "ours", "route_prefix": prefix, "import_path": "serve_app.app:build", "args": ARGS}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"applications": [ours, THEIRS], **top}))
    config = read_config(path)
    return Launch(Arguments.read(["run", str(path)], {}), config, read_applications(config), own_cluster)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    """Run this project's application, another one of the config, and one that no config here names.
    A signal comes once everything is printed."""
    found = Cluster(ours="RUNNING", theirs="RUNNING", another="RUNNING")
    for name in ("status", "delete", "shutdown"):
        monkeypatch.setattr(serve, name, getattr(found, name))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(shutdown, "drain", lambda name, *_: 0)
    monkeypatch.setattr(running, "_submit", lambda arguments: None)
    monkeypatch.setattr(running, "_lines_of_engine", lambda application, deployment: ["model    m"])
    monkeypatch.setattr(running, "wait_until_answering", lambda url: None)
    monkeypatch.setattr(running.signal, "pause", lambda: raising(SystemExit(0)))
    return found


def raising(error: BaseException) -> Any:
    raise error


def said_by(of: Launch) -> list[str]:
    """Return the lines up to the signal."""
    console = Said()
    with pytest.raises(SystemExit):
        running.run(of, [], console)
    return console.lines


def test_a_joined_cluster_may_have_its_proxy_elsewhere(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "wait_until_answering", lambda url: raising(NOT_ANSWERED))
    assert said_by(launch(tmp_path, own_cluster=False)) == [
        "model    m",
        f"application ours is running; not reachable from here: {NOT_ANSWERED}",
    ]
    assert cluster.done == []


def test_a_cluster_of_its_own_is_taken_down_when_it_does_not_answer(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "wait_until_answering", lambda url: raising(NOT_ANSWERED))
    with pytest.raises(StartFailed):
        running.run(launch(tmp_path, own_cluster=True), [], Said())
    assert cluster.done == ["delete ours", "delete theirs", "delete another", "shutdown"]


@pytest.mark.parametrize("own_cluster", [True, False])
def test_without_a_proxy_nobody_is_asked(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, own_cluster: bool
) -> None:
    monkeypatch.setattr(running, "wait_until_answering", lambda url: pytest.fail(f"asked {url}"))
    lines = said_by(launch(tmp_path, own_cluster, proxy_location="Disabled"))
    assert lines[-1].startswith("application ours is running; proxy_location is Disabled")


def test_without_a_route_nobody_is_asked(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers at `/` is another application, or nothing, which was taken for a start that has failed."""
    monkeypatch.setattr(running, "wait_until_answering", lambda url: pytest.fail(f"asked {url}"))
    lines = said_by(launch(tmp_path, own_cluster=True, prefix=None))
    assert lines[-1] == "application ours is running; route_prefix is null, so only its handle reaches it"
    assert cluster.done == []


@pytest.mark.parametrize(
    ("prefix", "location", "url"),
    [
        ("/a", "EveryNode", "http://127.0.0.1:8000/a"),
        (None, "EveryNode", ""),
        ("/a", "Disabled", ""),
    ],
    ids=["a route", "no route", "no proxy"],
)
def test_the_note_of_a_server_has_the_address_at_which_it_is_reached(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, prefix: str | None, location: str, url: str
) -> None:
    """`chunkserve chat` took the address of another application for that of one that only its handle reaches."""
    found: list[str] = []
    monkeypatch.setattr(running, "noted", lambda server: nullcontext(found.append(server.url)))
    said_by(launch(tmp_path, True, prefix, proxy_location=location))
    assert found == [url]


def test_a_failed_start_leaves_the_others_of_a_joined_cluster(tmp_path: Path, cluster: Cluster) -> None:
    cluster.statuses["ours"] = "DEPLOY_FAILED"
    with pytest.raises(StartFailed, match="application ours failed to start: it broke"):
        running.run(launch(tmp_path, own_cluster=False), [], Said())
    assert cluster.done == ["delete ours", "delete theirs"]


@pytest.mark.parametrize(
    ("own_cluster", "done"),
    [(True, ["delete ours", "delete theirs", "delete another", "shutdown"]), (False, ["delete ours", "delete theirs"])],
)
def test_applications_drain_at_the_same_time(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, own_cluster: bool, done: list[str]
) -> None:
    """One after another, the last took requests until it was its turn, and the command took the sum of all drains."""
    all_drain = Barrier(3 if own_cluster else 2)
    monkeypatch.setattr(shutdown, "drain", lambda *_: all_drain.wait(5))
    monkeypatch.setattr(running.signal, "pause", lambda: raising(SystemExit(signal.SIGTERM)))
    running.run(launch(tmp_path, own_cluster), [], Said())
    assert cluster.done == done


def test_a_signal_leaves_the_others_of_a_joined_cluster(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C used to take down Serve, with everybody's applications."""
    monkeypatch.setattr(running.signal, "pause", lambda: raising(SystemExit(signal.SIGINT)))
    running.run(launch(tmp_path, own_cluster=False), [], Said())
    assert cluster.done == ["delete ours", "delete theirs"]


def test_an_engine_is_asked_by_a_method_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines were a warning once the method had another name."""
    facts = EngineFacts("e", EngineVersion("m", "s"), resolved_config(max_model_len=777))

    class Handle:
        def _init(self, **options: object) -> None:
            """Serve's own; see `_lines_of_engine`."""

        def __getattr__(self, name: str) -> Any:
            assert inspect.signature(getattr(EngineReplica, name)).return_annotation == "EngineFacts"
            return SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda timeout_s: facts))

    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda deployment, application: Handle())
    application, *_ = launch(tmp_path, own_cluster=True).applications
    assert "777" in "\n".join(running._lines_of_engine(application, "Engine"))


def test_an_engine_that_does_not_say_what_it_chose_is_a_warning(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        running, "_lines_of_engine", lambda application, deployment: raising(TimeoutError("no answer in 30 s"))
    )
    warning, ready = said_by(launch(tmp_path, own_cluster=True))
    assert warning == "warning  no engine of ours reports its configuration: TimeoutError: no answer in 30 s"
    assert ready.startswith("chunkserve is ready")
    assert cluster.done == []


def test_an_error_that_nobody_foresaw_takes_down_what_runs(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "wait_until_running", lambda *_: raising(RayError("the controller died")))
    with pytest.raises(RayError, match="the controller died"):
        running.run(launch(tmp_path, own_cluster=True), [], Said())
    assert cluster.done[-1] == "shutdown"


def test_a_failure_is_reported_even_if_nothing_can_be_taken_down(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "status", lambda: raising(RayError("the controller died")))
    console = Said()
    with pytest.raises(RayError):
        running.run(launch(tmp_path, own_cluster=True), [], console)
    assert console.lines[-1] == "not everything was taken down: RayError: the controller died"


class Lost(Console):
    """A terminal that has gone once the server is ready."""

    def say(self, text: str) -> None:
        if not text.startswith("model"):
            raise OutputLost(BrokenPipeError(errno.EPIPE, "Broken pipe"))


def test_a_start_whose_lines_nobody_reads_is_taken_down_as_a_whole(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(OutputLost):
        running.run(launch(tmp_path, own_cluster=True), [], Lost())
    assert cluster.done == ["delete ours", "delete theirs", "delete another", "shutdown"]


def test_a_terminal_that_has_gone_does_not_cut_the_shutdown_short(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_report", lambda *_: None)
    monkeypatch.setattr(running.signal, "pause", lambda: raising(SystemExit(signal.SIGTERM)))
    running.run(launch(tmp_path, own_cluster=True), [], Lost())
    assert cluster.done == ["delete ours", "delete theirs", "delete another", "shutdown"]


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        ("/dev/full", 1, "write error: No space left on device\n"),
        ("a pipe without a reader", 141, ""),
    ],
)
def test_an_output_that_takes_nothing_ends_serve_without_a_traceback(output: str, status: int, said: str) -> None:
    """Here with `serve --version`; the lines of a start go the same way."""
    code = "import sys; from serve_app.front import cli; sys.argv = ['serve', '--version']; cli.main()"
    if output.startswith("/"):
        writable = os.open(output, os.O_WRONLY)
    else:
        read, writable = os.pipe()
        os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writable, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    finally:
        os.close(writable)
    assert (done.returncode, done.stderr) == (status, said)


def test_a_full_disk_of_ray_or_a_temporary_directory_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ray/x")
    monkeypatch.setattr(cli, "_run", lambda *_: raising(full))
    with pytest.raises(SystemExit, match="1"):
        cli.serve(["run", "c.yaml"], Console(), refused=2)
    assert capfd.readouterr().err == "write error: /tmp/ray/x: No space left on device\n"


def test_an_error_that_nobody_foresaw_is_a_line_on_the_terminal_and_a_traceback_in_the_log(tmp_path: Path) -> None:
    """It runs in another process, because the terminal's file descriptors become the log's."""
    code = """
import sys
from serve_app.front import cli

def failing(arguments, console):
    with console.quiet():
        raise TimeoutError("the controller took longer than 30 s\\nand more")

cli._run = failing
sys.argv = ["serve", "run", "c.yaml"]
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
        check=False,
    )
    (log,) = tmp_path.glob("**/serve-run-*.log")
    assert done.returncode == 1
    assert (done.stdout, done.stderr.splitlines()) == (
        "",
        ["serve failed: TimeoutError: the controller took longer than 30 s", f"log: {log}"],
    )
    assert log.read_text().startswith("Traceback")


def test_a_traceback_that_ray_sends_is_reported_by_its_last_line() -> None:
    assert in_a_line(ValueError("ray::f() (pid=7)\n  File x\nKeyError: 'a'\n")) == "ValueError: KeyError: 'a'"
    assert in_a_line(TimeoutError()) == "TimeoutError"


def test_rays_command_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's command would wait for ever beside an application that failed; this project's waits in its place."""
    given: list[str] = []
    monkeypatch.setattr(scripts.cli, "main", lambda args, **_: given.extend(args))
    running._submit(Arguments.read(["run", "c.yaml", "--blocking"], {}))
    assert scripts.run.make_context("run", given[1:]).params["blocking"] is False
