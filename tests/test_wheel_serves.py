"""The wheel as users have it: an environment without a compiler serves from it, and Ray's own `serve` belongs to Ray
before, with, and after it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadtest.server import ended, free_port
from tests.support.wheels import PROJECT, built_wheel, pip

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory)


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
