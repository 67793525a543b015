"""Owns the built manifests: kustomize's output for a directory, and the copies under `rendered/` that tests read.
Never edits a source. A copy whose sources have changed is reported as out of date."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from k8s.validate import tools
from k8s.validate.manifests import BUILDS, K8S, OVERLAYS, RENDERED, Doc, Finding, read

_SOURCES = ("base", "components", "overlays")
_STAMP = "# Built by `make render-k8s` from sources with the SHA-256 "


class BuildError(RuntimeError):
    """kustomize refuses a directory. The message is kustomize's."""


def build(name: str) -> str:
    """Build one of BUILDS as YAML. Raises BuildError, ToolMissing."""
    return _built(BUILDS[name], name)


def build_example(kustomization: str) -> str:
    """Build a kustomization as if it stood beside the overlays. Raises as `build`."""
    with tempfile.TemporaryDirectory() as scratch:
        for top in _SOURCES:
            shutil.copytree(K8S / top, Path(scratch) / top)
        own = Path(scratch) / "overlays" / "own"
        own.mkdir()
        (own / "kustomization.yaml").write_text(kustomization)
        return _built(own, "the example")


def _built(directory: Path, name: str) -> str:
    done = tools.run("kubectl", "kustomize", directory)
    if done.returncode:
        raise BuildError(f"{name}: {done.stderr.strip()}")
    return done.stdout


def sources_digest(root: Path = K8S) -> str:
    """Return the SHA-256 of all files that overlays are made of, including their names."""
    digest = hashlib.sha256()
    for path in sorted(path for top in _SOURCES for path in (root / top).rglob("*.yaml")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def rendered_path(name: str) -> Path:
    return RENDERED / f"{name}.yaml"


def rendered(name: str) -> list[Doc]:
    """Return the documents of an overlay as last built."""
    return read(rendered_path(name).read_text())


def render() -> None:
    """Build every overlay anew, and remove the copies of overlays that no longer exist."""
    for path in RENDERED.glob("*.yaml"):
        path.unlink()
    for name in OVERLAYS:
        rendered_path(name).write_text(_stamped(build(name)))


def _stamped(text: str) -> str:
    return f"{_STAMP}{sources_digest()}.\n{text}"


def check_stamps() -> list[Finding]:
    """Find copies whose sources have changed since. Needs no kustomize."""
    wanted = f"{_STAMP}{sources_digest()}."
    stale = [name for name in OVERLAYS if _first_line(rendered_path(name)) != wanted]
    return _out_of_date(stale)


def check_copies(built: dict[str, str]) -> list[Finding]:
    """Find copies that differ from what kustomize builds now."""
    return _out_of_date([name for name in OVERLAYS if _read(rendered_path(name)) != _stamped(built[name])])


def _out_of_date(names: Iterable[str]) -> list[Finding]:
    return [Finding(f"rendered/{name}.yaml", "", "is out of date: `make render-k8s`") for name in names]


def _first_line(path: Path) -> str:
    return _read(path).partition("\n")[0]


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
