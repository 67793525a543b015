"""Provides what each server's HAProxy needs for itself: a directory, ports, and the launcher by which Ray starts it.
Never configures routing: Ray Serve writes HAProxy's configuration, and reloads it."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve_app.edge import launcher
from serve_app.edge.cors import VARIABLE
from serve_app.edge.haproxy_config import EdgeError, cors_policies, per_source_limit

_FIRST_PORT, _LAST_PORT, _BLOCK_PORTS = 20_000, 29_999, 500
"""The range lies between Ray's worker ports and those that Linux uses for outgoing connections. Each server has a
block: its first port is held as the lock, the second is the fallback proxy's, and the others are for ingress replicas.
Ray does not reuse a replica's port while an old HAProxy may know it, an hour by our settings, so a block has many
ports."""
_MAXCONN = 4096  # Ray's default
_CORES_PER_THREAD = 4
"""More threads of HAProxy cost time by waking each other; one passes on 50,000 tokens a second (measured: 15 to 20 us
each)."""
_MAX_THREADS = 64
"""HAProxy refuses more unless they are in groups, which Ray's configuration does not have."""
_FILES_PER_THREAD = 3
_SPARE_FILES = 64
"""Its own sockets and logs are 24. The others are for the health checks of ingress replicas: HAProxy starts again with
each replica that comes, and ends where it may not open as many files as it then asks for."""
_CHECK_TIMEOUT_S = 10

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
_PORT_NAMES = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
_FALLBACK_PORT = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"

_LAUNCHER = """#!/bin/sh
exec {python} -P -m serve_app.edge.launcher "$@"
"""
_PROBE = """global
    maxconn 10
    tune.bufsize 16384
defaults
    mode http
    timeout client 1s
    timeout connect 1s
    timeout server 1s
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:9102
listen stats
    bind :9103
"""


class HAProxyUnusable(Exception):
    """HAProxy cannot run in front on this machine. The message says why."""


class HAProxyMisconfigured(HAProxyUnusable):
    """A setting for HAProxy is wrong, so the Python proxy must not silently replace it."""


@dataclass(frozen=True, slots=True)
class PrivateHAProxy:
    """`launcher`: Ray starts it as HAProxy. `environment`: the files, ports and threads of HAProxy and the replicas."""

    launcher: Path
    environment: dict[str, str]


@contextmanager
def private_haproxy(environ: Mapping[str, str]) -> Iterator[PrivateHAProxy]:
    """Provide a directory that only this user can read, removed at the end, and a block of ports that no other server
    has.

    Raises:
        HAProxyUnusable: there is no binary, or it does not run, or it may not open enough files.
    """
    maxconn = _whole_number(environ, "MAXCONN", _MAXCONN)
    threads = _whole_number(environ, "NBTHREAD", _default_threads())
    _check_settings(environ, maxconn)
    _check_open_files(maxconn, threads)
    # The path must be short: a Unix socket's path has at most 107 bytes, and Ray and HAProxy add up to 81.
    with _directory() as directory, _lock_ports() as first_port:
        path = _write_launcher(directory)
        chosen = _chosen_binary(environ)
        _check(path, directory, {**environ, **chosen})
        own = chosen | _paths(directory) | _ports(first_port, environ)
        yield PrivateHAProxy(path, own | {"RAY_SERVE_HAPROXY_NBTHREAD": str(threads)})


def _default_threads() -> int:
    return min(max(1, (os.cpu_count() or 1) // _CORES_PER_THREAD), _MAX_THREADS)


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(f"RAY_SERVE_HAPROXY_{name}", str(default))
    if not (given.isascii() and given.isdecimal() and int(given)):
        raise HAProxyMisconfigured(f"RAY_SERVE_HAPROXY_{name} must be a whole number above 0, but it is {given!r}.")
    return int(given)


def _check_settings(environ: Mapping[str, str], maxconn: int) -> None:
    try:
        per_source_limit(environ, maxconn)
        cors_policies(environ)
    except EdgeError as error:
        raise HAProxyMisconfigured(str(error)) from error


def _chosen_binary(environ: Mapping[str, str]) -> dict[str, str]:
    """Pass the user's binary on to the launcher, which takes its place in the environment."""
    chosen = environ.get(BINARY_PATH, "")
    return {} if Path(chosen).name in ("", launcher.NAME) else {launcher.BINARY: chosen}


def open_files(max_connections: int = _MAXCONN, threads: int = 1) -> int:
    """Return how many files HAProxy wants to open at its start: two for each connection, two for each pipe, three for
    each thread, and some. Ray switches splicing on, for which there is a pipe for every fourth connection."""
    return 2 * max_connections + 2 * (max_connections // 4) + _FILES_PER_THREAD * threads + _SPARE_FILES


def _check_open_files(max_connections: int, threads: int) -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files(max_connections, threads)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise HAProxyUnusable(f"it needs {needed} open files, the limit is {limit} (ulimit -Hn)")


@contextmanager
def _directory() -> Iterator[Path]:
    try:
        path = Path(tempfile.mkdtemp(prefix="hap", dir="/tmp"))
    except OSError as error:
        raise HAProxyUnusable(str(error)) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # an HAProxy that is being killed may still write files


@contextmanager
def _lock_ports() -> Iterator[int]:
    for first in range(_FIRST_PORT, _LAST_PORT, _BLOCK_PORTS):
        with socket.socket() as lock, socket.socket() as fallback:
            try:
                lock.bind(("", first))
                fallback.bind(("", first + 1))
            except OSError:
                continue
            fallback.close()
            yield first
            return
    raise HAProxyUnusable(f"every block of ports from {_FIRST_PORT} to {_LAST_PORT} has a port in use")


def _ports(first: int, environ: Mapping[str, str]) -> dict[str, str]:
    lowest, highest = _PORT_NAMES
    if lowest in environ or highest in environ:  # half of our range would not match half of the user's
        return {_FALLBACK_PORT: str(first + 1)}
    return {_FALLBACK_PORT: str(first + 1), lowest: str(first + 2), highest: str(first + _BLOCK_PORTS - 1)}


def _paths(directory: Path) -> dict[str, str]:
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
    }


def _write_launcher(directory: Path) -> Path:
    path = directory / "haproxy"
    path.write_text(_LAUNCHER.format(python=shlex.quote(sys.executable)))
    path.chmod(0o700)
    return path


def _check(path: Path, directory: Path, environ: Mapping[str, str]) -> None:
    try:
        _check_runs(path, directory, environ)
    except HAProxyUnusable as error:
        _check_runs(path, directory, {**environ, VARIABLE: ""})
        # Python's expressions are not quite HAProxy's, which are PCRE.
        expressions = [policy.allow_origin_regex for policy in cors_policies(environ)]
        text = f"args.cors.allow_origin_regex: HAProxy cannot read it; the expressions are {expressions}: {error}"
        raise HAProxyMisconfigured(text) from error


def _check_runs(path: Path, directory: Path, environ: Mapping[str, str]) -> None:
    """Check the configuration through the launcher, as Ray starts it: this reveals a /tmp without execution rights, or
    a missing library."""
    probe = directory / "probe.cfg"
    probe.write_text(_PROBE)
    try:
        done = subprocess.run(
            [path, "-c", "-f", probe],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HAProxyUnusable(str(error)) from error
    if done.returncode:
        raise HAProxyUnusable(_first_alert(done.stderr) or f"exit code {done.returncode}")


def _first_alert(said: str) -> str:
    """HAProxy's last lines say only that there was one; without any, what was wrong stands last."""
    lines = said.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith("[ALERT]")), lines[-1])
