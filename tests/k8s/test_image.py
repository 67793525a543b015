"""The Dockerfile, as far as it can be checked without building it: it copies files that exist, and all that runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from k8s.validate.builds import rendered
from k8s.validate.manifests import K8S, ROOT, groups, of_kind
from serve_app.front.proxy_env import ALL_OURS
from tests.k8s.image import DOCKERFILE, hook_files

COPIED = [
    source for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]
]
IGNORED = (K8S / "Dockerfile.dockerignore").read_text().splitlines()


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    kept = [line[1:] for line in IGNORED if line.startswith("!")]
    assert COPIED
    for source in COPIED:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in kept), source


def test_every_package_that_is_installed_is_copied() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.partition(".")[0] for name in packages} <= set(COPIED)


def test_the_kernels_are_compiled_where_the_package_is_installed() -> None:
    """A pod does not compile them at each start. A GPU's Triton compiles what it launches, which takes a C compiler."""
    build, _, final = DOCKERFILE.partition("\nFROM ${PYTHON_IMAGE}\n")
    assert re.search(r"apt-get install .*g\+\+.*pip install .*\.\[\$\{EXTRAS", build, re.DOTALL)
    assert re.search(r"apt-get install .* gcc libc6-dev ", final)


def test_the_image_runs_as_the_user_that_the_pods_say() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["1000:1000"]
    assert "useradd --uid 1000" in DOCKERFILE


def test_the_labels_have_the_projects_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'org.opencontainers.image.version="{version}"' in DOCKERFILE
    assert f"--tag chunkserve:{version}-ray2.60.0" in DOCKERFILE


def test_the_haproxy_that_the_pods_name_is_a_command_of_the_installed_project() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (service,) = of_kind(rendered("gpu"), "RayService")
    for group in groups(service):
        directory, _, name = str(group.env()["RAY_SERVE_HAPROXY_BINARY_PATH"]).rpartition("/")
        assert f"{directory}:$PATH" in DOCKERFILE
        assert scripts[name] == "serve_app.edge.launcher:main"


def test_what_the_pods_set_of_haproxy_is_what_serve_run_sets_itself() -> None:
    (service,) = of_kind(rendered("gpu"), "RayService")
    for group in groups(service):
        assert {name: value for name, value in group.env().items() if name in ALL_OURS} == ALL_OURS


def test_the_hook_runs_from_the_files_that_are_in_the_image_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "k8s.drain", "--help"]
    env = {"PYTHONPATH": str(hook_files(tmp_path)), "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
