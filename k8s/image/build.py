"""Owns building the image without a daemon: a base of Debian's packages, and on it the Dockerfile's steps by buildah.
Never changes a step. Where a registry can be reached, `docker build` takes them on the base that it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from k8s.validate.manifests import K8S, ROOT

PROGRAMS = ("mmdebstrap", "buildah")
"""Each is a Debian package of the same name."""
SUITE = "bookworm"
"""The release of the Dockerfile's own base; its Python is 3.11, too."""
_PACKAGES = "ca-certificates,python3,python3-venv,python-is-python3"
_BASE = "localhost/chunkserve-base"


def image_name() -> str:
    """Return the name and tag of the image, which compose.yaml and the manifests use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return f"chunkserve:{project['version']}-ray{version('ray')}"


class BuildFailed(RuntimeError):
    """A program is missing or failed. The message says which; what a failed one said is on standard error."""


def check_machine() -> None:
    """Raises BuildFailed: a program is missing, or this is not root, whose rights a step in a chroot needs."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise BuildFailed(
            f"missing: {', '.join(missing)}: `apt-get install --no-install-recommends {' '.join(missing)}`"
        )
    if os.geteuid() != 0:
        raise BuildFailed("building needs root: without a daemon, the Dockerfile's steps run in a chroot")


def build(to: Path, tag: str, scratch: Path, *, arguments: Sequence[str] = (), shown: Sequence[str] = ()) -> None:
    """Build the image as an OCI archive.

    Args:
        to: the archive; it is replaced.
        tag: name of the image in it, as in `chunkserve:0.1.0`.
        scratch: a directory for some gigabytes; what is in it is of no use afterwards.
        arguments: the Dockerfile's arguments, as NAME=VALUE.
        shown: HOST:PATH of what steps see of this machine, such as pip's configuration. None of it is in the image.

    Raises:
        BuildFailed: a program is missing or failed, or this is not root.
    """
    check_machine()
    base = scratch / "base.tar"
    _run("mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", SUITE, str(base))
    buildah = _Buildah(scratch)
    container = buildah.run("from", "scratch").strip()
    buildah.run("add", "--quiet", container, str(base), "/")
    buildah.run("commit", "--quiet", "--rm", container, _BASE)
    base.unlink()
    buildah.run(
        *("build", "--isolation", "chroot", "--squash", "--format", "oci", "--pull-never"),
        *("--file", str(K8S / "Dockerfile"), "--ignorefile", str(K8S / "Dockerfile.dockerignore")),
        *(word for argument in (f"PYTHON_IMAGE={_BASE}", *arguments) for word in ("--build-arg", argument)),
        *(word for place in shown for word in ("--volume", f"{place}:ro")),
        *("--tag", f"localhost/{tag}", str(ROOT)),
    )
    to.parent.mkdir(parents=True, exist_ok=True)
    to.unlink(missing_ok=True)
    buildah.run("push", "--quiet", f"localhost/{tag}", f"oci-archive:{to}:{tag}")


class _Buildah:
    """buildah with a store of its own, apart from the user's images."""

    def __init__(self, scratch: Path) -> None:
        self._store = ("--root", str(scratch / "store"), "--runroot", str(scratch / "run"), "--storage-driver", "vfs")

    def run(self, *words: str) -> str:
        return _run("buildah", *self._store, *words)


def _run(*command: str) -> str:
    """Run a program, whose progress goes to this one's standard error, and return what it prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command[:1])} ended with status {done.returncode}; see above")
    return done.stdout
