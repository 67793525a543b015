"""Owns the bill of materials of an installed server: what an SBOM of the whole environment says of the server's own
dependencies, and the files of others that are in our packages.
Never finds a distribution itself: cyclonedx-py does, in an environment of its own, and checks the result."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from k8s.validate.manifests import ROOT

Doc = dict[str, Any]

EXTRAS = ("tracing",)
"""What the image installs; k8s/Dockerfile has the same."""
SPEC = "1.6"
_OUT = ROOT / "build" / "sbom.cdx.json"
_SHAPES = ROOT / "engine" / "models" / "shapes"
_MARKED = ROOT / "serve_app" / "page" / "vendor" / "marked.umd.js"


class SbomError(RuntimeError):
    """The bill cannot be made, or is not valid. The message says why."""


def needed(extras: Iterable[str] = EXTRAS, root: str = "chunkserve") -> set[str]:
    """Return the canonical names of the distributions that the project with these extras needs here, itself included.
    Raises SbomError: one is not installed."""
    seen, left = set[tuple[str, frozenset[str]]](), [(root, frozenset(extras))]
    while left:
        name, wanted = left.pop()
        if (canonicalize_name(name), wanted) in seen:
            continue
        seen.add((canonicalize_name(name), wanted))
        try:
            requirements = [Requirement(line) for line in distribution(name).requires or ()]
        except PackageNotFoundError:
            raise SbomError(f"{name} is needed and not installed: `make install`") from None
        for one in requirements:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                left.append((one.name, frozenset(one.extras)))
    return {name for name, _ in seen}


def pruned(whole: Doc, names: set[str]) -> Doc:
    """Keep of an environment's bill the components of these names, and of its graph the edges between them."""
    kept = [one for one in whole["components"] if canonicalize_name(one["name"]) in names]
    refs = {one["bom-ref"] for one in kept} | {whole["metadata"]["component"]["bom-ref"]}
    edges = [
        {**edge, "dependsOn": [ref for ref in edge.get("dependsOn", []) if ref in refs]}
        for edge in whole["dependencies"]
        if edge["ref"] in refs
    ]
    return {**whole, "components": kept, "dependencies": edges}


def of_others() -> list[Doc]:
    """Return a component for each file in our packages that others have written: published configurations of models,
    and the page's library."""
    shapes = [
        {
            "type": "data",
            "bom-ref": f"file:{path.relative_to(ROOT)}",
            "name": str(path.relative_to(ROOT)),
            "description": f"The published configuration of the model {path.parent.name}.",
            "hashes": [{"alg": "SHA-256", "content": sha256(path.read_bytes()).hexdigest()}],
        }
        for path in sorted(_SHAPES.rglob("config.json"))
    ]
    return [*shapes, _marked()]


def _marked() -> Doc:
    """Return the component of the page's Markdown library, by what is said beside it."""
    notice = _MARKED.with_name("THIRD_PARTY.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^  version: (.+)$", notice, re.MULTILINE)
    return {
        "type": "library",
        "bom-ref": f"file:{_MARKED.relative_to(ROOT)}",
        "name": str(_MARKED.relative_to(ROOT)),
        "version": version,
        "purl": f"pkg:npm/marked@{version}",
        "licenses": [{"license": {"id": one}} for one in ("MIT", "BSD-3-Clause")],
        "hashes": [{"alg": "SHA-256", "content": sha256(_MARKED.read_bytes()).hexdigest()}],
    }


def make(tool: Path, python: Path, extras: Iterable[str] = EXTRAS) -> Doc:
    """Make the bill of what the project needs with these extras, as installed in the environment of `python`.

    Args:
        tool: directory of the programs of an environment with cyclonedx-bom.
        python: this environment's own interpreter.

    Raises:
        SbomError: cyclonedx-py failed, or the result is not valid.
    """
    options = ("--pyproject", str(ROOT / "pyproject.toml"), "--spec-version", SPEC, "--output-format", "JSON")
    made = _run(tool / "cyclonedx-py", "environment", "--output-reproducible", *options, str(python))
    bill = pruned(json.loads(made), needed(extras))
    bill["components"] += of_others()
    validate(tool, bill)
    return bill


_VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
found = JsonStrictValidator(SchemaVersion[sys.argv[1]]).validate_str(sys.stdin.read())
sys.exit(str(found) if found else 0)
"""


def validate(tool: Path, bill: Doc) -> None:
    """Hold a bill against CycloneDX's schema. Raises SbomError."""
    _run(tool / "python", "-c", _VALIDATE, f"V{SPEC.replace('.', '_')}", stdin=json.dumps(bill))


def _run(program: Path, *words: str, stdin: str | None = None) -> str:
    try:
        done = subprocess.run([program, *words], input=stdin, capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        raise SbomError(f"{program}: {error.strerror}: `make sbom` installs it") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise SbomError(f"{program.name}: {lines[-1]}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 with a line on standard error if the bill cannot be made or is not valid."""
    parser = argparse.ArgumentParser(
        prog="python -m k8s.sbom",
        description="Write what an installed server consists of, as CycloneDX JSON: distributions with versions and "
        "licences, and files of others in our packages. `make sbom` installs what it needs.",
    )
    parser.add_argument("--tool", type=Path, required=True, help="directory of cyclonedx-py and its python")
    parser.add_argument("--extras", default=",".join(EXTRAS), help=f"the project's extras ({','.join(EXTRAS)})")
    parser.add_argument("--out", type=Path, default=_OUT, help="the file (build/sbom.cdx.json)")
    options = parser.parse_args(arguments)
    try:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        extras = options.extras.split(",")
        if unknown := [extra for extra in extras if extra not in known]:
            raise SbomError(f"--extras: {', '.join(unknown)}: expected some of {', '.join(known)}")
        bill = make(options.tool, Path(sys.executable), extras)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    except (SbomError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {len(bill['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
