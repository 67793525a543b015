"""Owns a server under test: a command with its own port and session, the CPU time and memory of its processes, and its
end. Never reuses a running server, and never leaves one of its processes behind."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from random import SystemRandom
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SERVE = Path(sys.executable).with_name("serve")
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 90
GONE_TIMEOUT_S = 30
PORTS = range(20_000, 30_000)
"""Ports that no process gets by chance: below Linux's ephemeral ports (from 32768, where Ray's agent also takes 52365),
above Ray's workers (to 19999), and outside Serve's direct ingress (from 30000)."""

_KINDS = (  # the first mark that the command line contains decides; Ray names its workers after what they run
    ("/bin/haproxy", "haproxy"),
    ("ray::HAProxyManager", "proxy"),
    ("ray::ProxyActor", "proxy"),
    (":Ingress", "ingress"),
    (":Engine", "engine"),
)
REST = "rest"
"""Controller, GCS, raylet, dashboard and the command itself."""
KINDS = ("haproxy", "proxy", "ingress", "engine", REST)

CpuTime = dict[str, float]
"""CPU seconds by kind of process."""


def kind_of(command: str) -> str:
    return next((kind for mark, kind in _KINDS if mark in command), REST)


class Server:
    """A running server: a `serve run`, or another command that answers HTTP on a port."""

    def __init__(self, process: subprocess.Popen[Any], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def output(self) -> str:
        """What the server has printed so far."""
        return self._log.read_text(errors="replace")

    def wait_until_ready(self, path: str = "/health", timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until a GET of `path` returns 200.

        Raises: RuntimeError: the server ended, its application failed, or it was not ready after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.output}")
            if "failed with exception" in self.output:
                raise RuntimeError(self.output)
            try:
                with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise RuntimeError(f"not ready after {timeout_s:g} s:\n{self.output}")

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, and return the exit status."""
        self.process.send_signal(signum)
        return self.process.wait(STOP_TIMEOUT_S)

    def cpu_time(self) -> CpuTime:
        """Return the CPU time that all processes of the server have used so far. Linux counts it in nanoseconds for
        each thread. Threads that have ended are not included, but the threads of a Ray worker live as long as it
        does."""
        total: CpuTime = defaultdict(float)
        for process in session_members(self.process.pid):
            with suppress(OSError):  # ended meanwhile
                spent = [int((task / "schedstat").read_text().split()[0]) for task in (process / "task").iterdir()]
                total[_kind(process)] += sum(spent) / 1e9
        return total

    def resident_bytes(self) -> dict[str, int]:
        """Return the memory of the server's processes by kind. A page that several share is counted once (proportional
        set size)."""
        total: dict[str, int] = defaultdict(int)
        for process in session_members(self.process.pid):
            with suppress(OSError):  # ended meanwhile
                total[_kind(process)] += _pss_bytes((process / "smaps_rollup").read_text())
        return total


def _kind(process: Path) -> str:
    return kind_of((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))


def _pss_bytes(smaps_rollup: str) -> int:
    return sum(1024 * int(line.split()[1]) for line in smaps_rollup.splitlines() if line.startswith("Pss:"))


def session_members(session: int) -> Iterator[Path]:
    """Yield the /proc directory of each process in a session."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, its_session = (process / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                yield process


def busy_s() -> float:
    """Return the CPU seconds that the machine's cores have worked so far, for any process."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serve_run(application: dict[str, Any], environment: dict[str, str]) -> Iterator[Server]:
    """Serve one application of a Serve config, with `environment` added to this process's own."""
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1"},
        "logging_config": {"enable_access_log": False},
        "applications": [{"name": "measured", "route_prefix": "/", **application}],
    }
    with starting(config, {"PYTHONPATH": str(ROOT), **environment}) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def starting(config: dict[str, Any], environment: dict[str, str]) -> Iterator[Server]:
    """Run a Serve config with its port set to a free one. The server may not answer yet."""
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))  # short: Ray's sockets live below it
    port = free_port()
    config = {**config, "http_options": {**config["http_options"], "port": port}}
    (temp / "config.yaml").write_text(yaml.safe_dump(config))
    command = [str(SERVE), "run", "--address", "local", str(temp / "config.yaml")]
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(temp), "CHUNKSERVE_VERBOSE": "1"}
    try:
        with launched(command, port, {**own, **environment}, temp / "serve.log") as server:
            yield server
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@contextmanager
def launched(
    command: Sequence[str], port: int, environment: dict[str, str], log: Path, cwd: Path | None = None
) -> Iterator[Server]:
    """Start a command that serves on `port`, in its own session. It may not answer yet. It ends with the block."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
            cwd=cwd,
        )
    with ended(process):
        yield Server(process, port, log)


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """At the end of the block, end a process that has its own session, and then what is left of the session."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        _kill_session(process.pid)
        process.wait()


def _kill_session(session: int) -> None:
    """Kill the processes of a session, again and again until none is left. One that was just being started is missing
    from an earlier list, and a killed one holds its memory for a moment, which must not disturb the next server."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := list(session_members(session)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[process.name for process in left]} outlive their SIGKILL")
        for member in left:
            with suppress(ProcessLookupError):
                os.kill(int(member.name), signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def haproxy_environment() -> Iterator[dict[str, str]]:
    """Yield the environment of HAProxy for an application that does not set it up itself. Its files and ports are its
    own, so that servers on one machine do not collide."""
    temp = tempfile.mkdtemp(prefix="lth", dir="/tmp")
    ports = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT", "FALLBACK_PROXY_GRPC_PORT")
    try:
        yield {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{temp}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{temp}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": temp,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{temp}/server-state",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            **{f"RAY_SERVE_{name}": str(free_port()) for name in ports},
        }
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def free_port() -> int:
    """Return one of `PORTS` that is free and that this process has not been given recently.

    Raises: RuntimeError: all are taken."""
    for port in islice(_in_turn, len(PORTS)):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free")


_in_turn = cycle(SystemRandom().sample(PORTS, len(PORTS)))


def machine() -> dict[str, str]:
    """Describe the machine and the software that figures were measured with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": commit.stdout.strip(),
        "cpu": f"{len(names)} x {names[0] if names else platform.processor()}",
        "python": platform.python_version(),
        "ray": version("ray"),
    }
