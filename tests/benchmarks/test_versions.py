"""Owns the contract of the comparison of two commits: which times are divided by which, and in which order they run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.versions import Program, compared, main, times_of

COUNTS = """
import json, pathlib, sys
log = pathlib.Path(sys.argv[sys.argv.index("--log") + 1])
with log.open("a") as file:
    file.write("{name} ")
print("a table")
cells = [{{"step": "decode", "size": 1, "ms_p50": {ms} + 0.0, "ms_min": 1.0}}, {{"step": "{name}", "ms_p50": 1.0}}]
print(json.dumps({{"cells": cells, "loops": [{{"step": "loop", "step_ms": {ms} * 2, "python_percent": 3.0}}]}}))
"""


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits: the second one's benchmark is in another module, and takes half as long."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.chdir(root)
    git("init", "--quiet", "--initial-branch", "main")
    for name, value in (("user.name", "a"), ("user.email", "a@b.c"), ("commit.gpgsign", "false")):
        git("config", name, value)
    (root / "old.py").write_text(COUNTS.format(name="old", ms=4))
    git("add", ".")
    git("commit", "--quiet", "-m", "old")
    git("tag", "before")
    git("mv", "old.py", "new.py")
    (root / "new.py").write_text(COUNTS.format(name="new", ms=2))
    git("commit", "--quiet", "-am", "new")
    return root


def test_two_commits_run_in_turn_and_the_cells_of_both_are_divided(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log", tmp_path / "out.json"
    program = Program("p", {"new": (), "old": ()}, ("--log", str(log)))
    main(["before", "--rounds", "3", "--out", str(out)], [program])
    assert log.read_text().split() == ["old", "new", "new", "old", "old", "new"]
    document = json.loads(out.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["before"], document["after"]) == tuple(
        git("rev-parse", "--short", name) for name in ("before", "HEAD")
    )
    ratios = {cell["cell"]: (cell["ratio"], cell["before_ms"], cell["after_ms"]) for cell in document["cells"]}
    assert ratios == {"p, step decode, size 1": (0.5, 4, 2), "p, step loop": (0.5, 8, 4)}
    assert git("worktree", "list").count("\n") == 0


def test_a_commit_without_the_benchmark_is_an_error_that_names_it(repository: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none of the modules elsewhere"):
        main(["before"], [Program("p", {"elsewhere": ()}, ())])
    assert git("worktree", "list").count("\n") == 0


def test_a_benchmark_that_fails_ends_the_comparison_with_what_it_said(repository: Path) -> None:
    with pytest.raises(RuntimeError, match=r"p failed (.|\n)*'--log' is not in list"):
        main(["before"], [Program("p", {"new": (), "old": ()}, ())])


def test_a_ratio_is_of_neighbours_in_time() -> None:
    """The machine may become slower in the course of a run."""
    before = [times_of("p", {"cells": [{"size": 1, "ms_p50": ms}]}) for ms in (1.0, 2.0, 8.0)]
    after = [times_of("p", {"cells": [{"size": 1, "ms_p50": ms}]}) for ms in (1.1, 2.2, 4.0)]
    (cell,) = compared(before, after)
    assert (cell["ratio"], cell["ratio_min"], cell["ratio_max"]) == (1.1, 0.5, 1.1)


def test_a_commit_that_is_not_there_is_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["before", "nowhere"])
    assert "nowhere is not a commit of this repository" in capsys.readouterr().err
