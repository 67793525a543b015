"""The image that `make image` built: a server starts from its files as a container's would, and sends a first token.
Not among the tests that pytest collects by itself: it needs that image, and root."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.checkpoints.model_cache import cache_root
from k8s.image import layout
from k8s.validate.manifests import ROOT
from loadtest.server import Server, free_port, launched
from tests.compose.project import services

ARCHIVE = ROOT / "build" / "chunkserve.oci.tar"
USER = "1000"
MODEL = "smollm2-135m-instruct"
IN_A_CONTAINER = """
set -eu
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -o remount,bind,ro "$root"
mount -t tmpfs -o exec,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o uid=1000,gid=1000,mode=0755 tmpfs "$root/home/ray"
mkdir -p "$root/home/ray/.cache/chunkserve/models"
chown -R 1000:1000 "$root/home/ray/.cache"
mount --bind -o ro "$CACHE/models" "$root/home/ray/.cache/chunkserve/models"
exec chroot --userspec=1000:1000 "$root" /usr/bin/env -i HOME=/home/ray "$@"
"""
"""As compose.yaml has it: a read-only file system, /tmp and a home that can be written, user 1000, no more rights.
The network is this machine's, and the model is the one of this machine's cache."""


@dataclass(frozen=True)
class Root:
    image: layout.Image
    path: Path


@pytest.fixture(scope="module")
def root() -> Iterator[Root]:
    with tempfile.TemporaryDirectory(prefix="chunkserve-root-", ignore_cleanup_errors=True) as scratch:
        image = layout.read(ARCHIVE)
        path = Path(scratch) / "root"
        path.mkdir(mode=0o755)  # the user of the image enters it
        layout.unpack(image, path)
        yield Root(image, path)


def contained(root: Root, *command: str, **environment: str) -> list[str]:
    """Return a command that runs another as the image's user, in the image's files."""
    variables = [f"{name}={value}" for name, value in {**root.image.environment, **environment}.items()]
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    directory = root.image.config.get("WorkingDir", "/")
    inner = f"cd {shlex.quote(directory)} && exec {shlex.join(command)}"
    return [*namespaces, "sh", "-c", IN_A_CONTAINER, "sh", str(root.path), *variables, "/bin/sh", "-c", inner]


def out(root: Root, *command: str) -> str:
    done = subprocess.run(
        contained(root, *command),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CACHE": str(cache_root())},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_image_runs_as_the_user_of_the_pods_and_without_a_health_check_of_its_own(root: Root) -> None:
    assert root.image.config["User"] == f"{USER}:{USER}"
    assert not root.image.config.get("Entrypoint")
    assert root.image.environment["PYTHONPATH"] == "/opt/chunkserve"
    assert out(root, "id", "-u").strip() == USER


def test_it_has_the_pinned_versions_the_compiled_kernels_and_the_drain_hook(root: Root) -> None:
    listed = out(root, "/opt/venv/bin/python", "-m", "pip", "freeze", "--all")
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    installed = {line.partition("+")[0] for line in listed.splitlines() if "==" in line}
    assert {line for line in installed - pins if not line.startswith(("pip==", "setuptools=="))} == set()
    assert list((root.path / "opt" / "venv").rglob("kernels/cpu/native/**/*.so"))
    assert "--deadline-s" in out(root, "python", "-m", "k8s.drain", "--help")


def test_nothing_of_the_build_or_of_this_machine_is_left_in_it(root: Root) -> None:
    assert not (root.path / "usr" / "bin" / "g++").exists(), "the kernels are compiled while the image is built"
    assert not (root.path / "src").exists()
    assert not list((root.path / "var" / "lib" / "apt" / "lists").glob("*Packages*"))
    assert not (root.path / "etc" / "pip.conf").exists() or not (root.path / "etc" / "pip.conf").read_text()


def test_its_file_system_is_read_only_but_for_its_home_and_tmp(root: Root) -> None:
    tried = "for d in / /opt/venv /tmp /home/ray; do touch $d/x 2>/dev/null && echo $d; done; true"
    assert out(root, "sh", "-c", tried).split() == ["/tmp", "/home/ray"]


@pytest.fixture(scope="module")
def server(root: Root) -> Iterator[Server]:
    port = free_port()
    command = [
        "chunkserve",
        "serve",
        MODEL,
        "--port",
        str(port),
        "--kv-cache-memory-gib",
        "0.5",
        "--max-model-len",
        "1024",
    ]
    variables = services()["chunkserve"]["environment"]
    environment = {"CACHE": str(cache_root())}
    command = contained(root, *command, CHUNKSERVE_VERBOSE="1", **variables)
    with launched(command, port, environment, root.path.with_suffix(".log")) as one:
        try:
            one.wait_until_ready("/ready")
            yield one
        finally:
            (inside,) = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
            os.kill(int(inside), signal.SIGTERM)  # `unshare` itself ignores it
            one.process.wait(60)


def test_a_server_starts_from_it_with_haproxy_and_native_kernels_and_sends_a_token(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 1
    assert "Python proxy is in front" not in server.output
    assert "native" in server.output
