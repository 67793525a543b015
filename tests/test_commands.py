"""Every command of the project says by --help what it is for, refuses an option that it does not know, and does nothing
in either case: once, a key was issued to the tenant `--help`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from docsite.commands import PROGRAMS
from loadtest.server import ROOT, SERVE
from tests.support.forked_commands import Ended, run_forked

PLACES = ("chunkserve", "engine", "kernels", "serve_app", "loadtest", "k8s", "benchmarks", "docsite", "tests")
MARK = 'if __name__ == "__main__":'
ANOTHER_PROGRAM = {"serve_app.edge.launcher"}
"""It becomes HAProxy, and passes its arguments on: the options are HAProxy's."""


def commands() -> list[str]:
    """Return every module that does something when it is run."""
    files = (path for place in PLACES for path in sorted((ROOT / place).rglob("*.py")))
    paths = (path.relative_to(ROOT) for path in files if f"\n{MARK}\n" in path.read_text(encoding="utf-8"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in paths]
    return [name for name in names if name not in ANOTHER_PROGRAM]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Run all commands in an empty directory, where it shows what a command writes unasked."""
    empty = tmp_path_factory.mktemp("empty")
    both = [[(command, "--help"), (command, "--no-such-option")] for command in commands()]
    ended = run_forked(both, empty)
    assert list(empty.iterdir()) == []
    words = (" ".join(one) for group in both for one in group)
    return dict(zip(words, (one for group in ended for one in group), strict=True))


def test_the_tree_has_commands() -> None:
    assert {"engine.checkpoints.prepare", "serve_app.auth", "k8s.validate", "tests.deep", "loadtest.load"} <= set(
        commands()
    )
    assert "tests.test_commands" not in commands()


@pytest.mark.parametrize("command", commands())
def test_a_command_says_what_it_is_for(outcomes: dict[str, Ended], command: str) -> None:
    found = outcomes[f"{command} --help"]
    assert (found.status, found.errors) == (0, "")
    usage, description, *_ = found.out.split("\n\n")
    assert usage.startswith("usage: ")
    assert not description.startswith(("options:", "positional arguments:")), "it has none"
    assert not re.search(r"\b(Owns|Never|Long):?\b", description), "that is what its file is for, not what it does"


@pytest.mark.parametrize("command", PROGRAMS)
def test_each_option_of_a_command_for_users_is_explained(outcomes: dict[str, Ended], command: str) -> None:
    told = outcomes[f"{command} --help"].out
    found = re.findall(r"^  (-[^\n]*|\w+ *(?:  [^\n]*)?)$((?:\n {6,}[^\n]*)*)", told.partition("\n\n")[2], re.MULTILINE)
    assert found
    assert [option for option, below in found if not (re.search(r"\S  +\S", option) or below)] == []


@pytest.mark.parametrize("command", commands())
def test_a_command_refuses_an_option_that_it_does_not_know(outcomes: dict[str, Ended], command: str) -> None:
    found = outcomes[f"{command} --no-such-option"]
    assert (found.status, found.out) == (2, "")
    assert found.errors.startswith("usage: ")


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SERVE, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_serve_says_its_version_and_what_it_takes() -> None:
    assert serve("--version").stdout.startswith("chunkserve 0.1.0, Ray 2.60.0")
    told = serve("run", "--help")
    assert told.returncode == 0
    assert "--verbose" in told.stdout
    assert "--address" in told.stdout


def test_serve_refuses_an_option_that_it_does_not_know() -> None:
    done = serve("run", "--no-such-option", "x")
    assert done.returncode == 2
    assert "No such option '--no-such-option'" in done.stderr


def test_make_clean_removes_every_environment_that_make_makes() -> None:
    """Regression: one of three gigabytes was left."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = set(re.findall(r"^PEERS_VENV \?= (\S+)|^(\.[\w-]+)/installed:", text, re.MULTILINE))
    removed = text.partition("\nclean:\n")[2].replace("$(PEERS_VENV)", ".venv-peers").split()
    assert len(made) > 4
    assert {peers or other for peers, other in made} <= set(removed)


def test_scripts_that_are_installed_are_known_here() -> None:
    """A new script has to be tested in the same way."""
    text = (ROOT / "pyproject.toml").read_text()
    scripts = text.partition("[project.scripts]\n")[2].partition("\n\n")[0]
    names = [line.partition(" = ")[0] for line in scripts.splitlines() if not line.startswith("#")]
    assert names == ["chunkserve", "chunkserve-haproxy"], "`serve` is Ray's"
    assert 'chunkserve = "serve_app.front.command.__main__:main"' in scripts
    assert 'chunkserve-haproxy = "serve_app.edge.launcher:main"' in scripts
    assert Path(SERVE).name == "serve"
