"""What `make validate-k8s` does where something is missing: it fails, and says what."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8s.validate import __main__ as validate
from k8s.validate import tools


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
