"""Runs this project's config.yaml as a user would, with the settings that a test wants, by loadtest/server.py.
Never reuses a running server, and never leaves a child behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from loadtest.server import ROOT, Server, session_members
from loadtest.server import starting as starting_config

PYTHON_PROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
_LISTEN = "0A"  # a state in /proc/net/tcp


@contextmanager
def serve_run(args: dict[str, Any], *, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start config.yaml with `args` merged over its own, on a free port, and end it with all its children."""
    with starting(args, env=env) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def starting(args: dict[str, Any], *, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Do as `serve_run`, without waiting until it answers."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"][0]["args"].update(args)
    with starting_config(config, env or {}) as server:
        yield server


@contextmanager
def serve_several(args: dict[str, Any], *, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Do as `serve_run`, with nothing of config.yaml but its application: `args` are all of the settings."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"][0]["args"] = args
    with starting_config(config, env or {}) as server:
        server.wait_until_ready()
        yield server


def members_of(session: int) -> dict[int, str]:
    """Map the processes in a session to their names: those that a `serve run` started, and itself."""
    found = {}
    for process in session_members(session):
        with suppress(OSError):  # ended meanwhile
            found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def left_of(server: Server, timeout_s: float = 20) -> dict[int, str]:
    """Return the processes left of a `serve run` that has ended, once they had time to follow it."""
    deadline = time.monotonic() + timeout_s
    while (left := members_of(server.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Return (address, port) of every TCP socket on which one of these processes listens."""
    inodes = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == _LISTEN and f"socket:[{rest[5]}]" in inodes:
            address, _, port = local.partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found
