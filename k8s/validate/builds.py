"""Owns the built manifests: what kustomize makes of a directory, and the copies under `rendered/` that tests read.
Never edits a source; a copy whose sources changed is out of date, and says so."""

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
    """kustomize refuses a directory. The message is its own."""


def build(name: str) -> str:
    """One of BUILDS as YAML. Raises BuildError, ToolMissing."""
    return _built(BUILDS[name], name)


def build_example(kustomization: str) -> str:
    """What a kustomization would make that stood beside the overlays, under a name of its own. Raises as `build`."""
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
    """Of every file that an overlay may be made of, names included."""
    digest = hashlib.sha256()
    for path in sorted(path for top in _SOURCES for path in (root / top).rglob("*.yaml")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def rendered_path(name: str) -> Path:
    return RENDERED / f"{name}.yaml"


def rendered(name: str) -> list[Doc]:
    """The documents of an overlay, as they were built last."""
    return read(rendered_path(name).read_text())


def render() -> None:
    """Build every overlay anew, and remove what is none any more."""
    for path in RENDERED.glob("*.yaml"):
        path.unlink()
    for name in OVERLAYS:
        rendered_path(name).write_text(_stamped(build(name)))


def _stamped(text: str) -> str:
    return f"{_STAMP}{sources_digest()}.\n{text}"


def check_stamps() -> list[Finding]:
    """Copies whose sources are others by now. Needs no kustomize."""
    wanted = f"{_STAMP}{sources_digest()}."
    stale = [name for name in OVERLAYS if _first_line(rendered_path(name)) != wanted]
    return _out_of_date(stale)


def check_copies(built: dict[str, str]) -> list[Finding]:
    """Copies that are not what kustomize makes now."""
    return _out_of_date([name for name in OVERLAYS if _read(rendered_path(name)) != _stamped(built[name])])


def _out_of_date(names: Iterable[str]) -> list[Finding]:
    return [Finding(f"rendered/{name}.yaml", "", "is out of date: `make render-k8s`") for name in names]


def _first_line(path: Path) -> str:
    return _read(path).partition("\n")[0]


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
