"""What `make validate-k8s` does where something is missing: it fails, and says what."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from k8s.validate import __main__ as validate
from k8s.validate import tools
from k8s.validate.builds import rendered
from k8s.validate.manifests import of_kind


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKSERVE_K8S_TOOLS", str(tmp_path / "tools"))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("name", tools.NAMES)
@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_program_is_named_with_what_gets_it(name: str) -> None:
    with pytest.raises(tools.ToolMissing, match=rf"{name} is missing.*make k8s-tools"):
        tools.find(name)


@pytest.mark.usefixtures("nothing_installed")
def test_validation_fails_without_kubectl(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([]) == 1
    assert "kubectl is missing" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_installed")
def test_promtool_cannot_be_had_where_there_is_no_debian(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        tools.ToolMissing, match=r"promtool cannot be downloaded: .*no apt-get here: put promtool on the"
    ):
        tools.fetch("promtool")


def redis_config(password: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run the container's script with a program in Redis' place that shows what it is given."""
    (container,) = [
        container
        for doc in of_kind(rendered("gcs-fault-tolerance"), "StatefulSet")
        for container in doc["spec"]["template"]["spec"]["containers"]
    ]
    (scratch / "redis-server").write_text("#!/bin/sh\nexec cat\n")
    (scratch / "redis-server").chmod(0o755)
    environment = {"PATH": f"{scratch}:{os.environ['PATH']}", "REDIS_PASSWORD": password}
    command = [*container["command"], *container["args"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("password", ["plain", "two words", 'a"b', "it's", "back\\slash\\", "#$HOME`id`$(id)", "\\x41"])
def test_any_password_reaches_redis_as_it_is(password: str, tmp_path: Path) -> None:
    """One with a space or a quote ended Redis at its start. Between double quotes, Redis and POSIX shells read the two
    characters that are escaped here alike."""
    config = redis_config(password, tmp_path).stdout.splitlines()
    assert shlex.split(config[-1]) == ["requirepass", password]


def test_redis_does_not_start_without_a_password(tmp_path: Path) -> None:
    """With an empty one in its config, it would let everybody in."""
    done = redis_config("", tmp_path)
    assert done.returncode
    assert "REDIS_PASSWORD: is empty" in done.stderr
    assert not done.stdout


def test_a_program_in_our_directory_goes_before_the_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("tools", "path"):
        (tmp_path / place).mkdir()
        program = tmp_path / place / "kubectl"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CHUNKSERVE_K8S_TOOLS", str(tmp_path / "elsewhere"))
    assert tools.find("kubectl") == tmp_path / "path" / "kubectl"
    monkeypatch.setenv("CHUNKSERVE_K8S_TOOLS", str(tmp_path / "tools"))
    assert tools.find("kubectl") == tmp_path / "tools" / "kubectl"
