"""Runs this project's `serve run` as a user would: its own process, a free port, a Ray of its own, always ended.
Never reuses a running server, and never leaves a child behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SERVE = Path(sys.executable).with_name("serve")
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 90
PYTHON_PROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
_LISTEN = "0A"  # a state in /proc/net/tcp


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class ServeProcess:
    """A running `serve run`. `output` is what it printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"serve run ended with {self.process.returncode}:\n{self.output}"
            assert "failed with exception" not in self.output, self.output
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError(f"not ready after {START_TIMEOUT_S} s:\n{self.output}")

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(STOP_TIMEOUT_S)


def members_of(session: int) -> list[str]:
    """`pid name` of every process in a session: the processes that a `serve run` started, and itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" ")
        except OSError:  # ended meanwhile
            continue
        name, _, numbers = rest.rpartition(") ")
        if int(numbers.split()[3]) == session and numbers.split()[0] != "Z":
            found.append(f"{pid} {name[1:]}")
    return found


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of these processes listens."""
    inodes = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == _LISTEN and f"socket:[{rest[5]}]" in inodes:
            address, _, port = local.partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def kill_members(session: int) -> None:
    """End what is left of a session. A process may end by itself between being listed and being signalled."""
    for member in members_of(session):
        with suppress(ProcessLookupError):
            os.kill(int(member.split()[0]), signal.SIGKILL)


@contextmanager
def serve_run(args: dict[str, Any], *, env: dict[str, str] | None = None) -> Iterator[ServeProcess]:
    """Start config.yaml with `args` merged over its own, on a free port, and end it with all its children."""
    with starting(args, env=env) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def starting(args: dict[str, Any], *, env: dict[str, str] | None = None) -> Iterator[ServeProcess]:
    """`serve_run` without waiting until it answers."""
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))  # short: Ray's sockets live below it
    port = free_port()
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"].update(args)
    (temp / "config.yaml").write_text(yaml.safe_dump(config))
    log = temp / "serve.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [SERVE, "run", "--address", "local", str(temp / "config.yaml")],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(temp), **(env or {})},
        )
    try:
        yield ServeProcess(process, port, log)
    finally:
        _end_all(process)
        shutil.rmtree(temp, ignore_errors=True)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    kill_members(process.pid)
