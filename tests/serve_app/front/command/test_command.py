"""`chunkserve` explains itself at once, and its small subcommands do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.server import ROOT
from serve_app.auth.keys import digest
from serve_app.front.command import version
from serve_app.front.command.__main__ import COMMANDS
from serve_app.settings.auth import ApiKey
from tests.docsite.blocks import BLOCKS
from tests.support.chunkserve import COMMAND, chunkserve, environment, refusal
from tests.test_architecture import run_python


def test_help_names_each_subcommand_and_what_it_is_for() -> None:
    done = chunkserve("--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert all(f"{name} {about}" in words for name, about in COMMANDS.items())


def test_without_a_subcommand_it_shows_the_help() -> None:
    assert chunkserve().stdout == chunkserve("--help").stdout


def test_a_subcommand_that_there_is_not_is_named_with_those_that_there_are() -> None:
    done = chunkserve("train")
    assert done.returncode == 2
    assert "'train'" in done.stderr
    assert all(name in done.stderr for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_subcommand_explains_itself_and_each_of_its_options(name: str) -> None:
    done = chunkserve(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: chunkserve {name} ")
    description = done.stdout.split("\n\n")[1]
    assert not description.startswith(("options:", "positional arguments:"))
    found = re.findall(r"^  (-[^\n]*|[\w|]+ *(?:  [^\n]*)?)$((?:\n {6,}[^\n]*)*)", done.stdout, re.MULTILINE)
    assert len(found) > 0
    assert [option for option, below in found if not (re.search(r"\S  +\S", option) or below)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_subcommand_refuses_an_option_that_it_does_not_know(name: str) -> None:
    line = refusal(name, *["x"] * (name in ("serve", "check", "convert")), "--no-such-option")
    assert line.startswith(f"chunkserve {name}: unrecognized arguments: --no-such-option")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_subcommand_waits_for_nothing_that_only_its_work_needs(name: str) -> None:
    """Once `serve --help` took 0.6 s of a processor, for pydantic, numpy, starlette and the engine."""
    code = f"""
import contextlib, io, sys
from serve_app.front.command.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main([{name!r}, "--help"])
print(sorted({{"pydantic", "numpy", "starlette", "jinja2", "tokenizers"}} & set(sys.modules)))
"""
    assert run_python(code) == "[]"


@pytest.mark.parametrize("words", [["--help"], ["version"], ["serve", "--help"], ["status", "--help"]])
def test_help_is_shown_without_torch_or_ray(words: list[str]) -> None:
    code = f"""
import contextlib, io, sys
from serve_app.front.command.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({words})
print(sorted({{"torch", "ray", "transformers"}} & set(sys.modules)))
"""
    assert run_python(code) == "[]"


def test_the_list_of_subcommands_imports_the_standard_library_only() -> None:
    code = """
import sys
import serve_app.front.command.__main__
print(sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"serve_app"}))
"""
    loaded = run_python(code)
    assert not {"pydantic", "yaml", "engine", "starlette"} & set(re.findall(r"\w+", loaded)), loaded


AT_ITS_END, AT_ONCE = "", "1"
"""When a command's output is written: PYTHONUNBUFFERED."""
PRINTING = pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--help", AT_ITS_END),
        ("--help", AT_ONCE),
        ("plan --help", AT_ONCE),
        ("version", AT_ITS_END),
        ("version", AT_ONCE),
        ("keys", AT_ITS_END),
        ("check config.yaml", AT_ITS_END),
        ("prepare", AT_ITS_END),
    ],
)
"""Commands that need nothing but what is here, and succeed."""


@PRINTING
def test_a_reader_that_has_left_ends_it_quietly(words: str, unbuffered: str) -> None:
    """It ends as if the signal of a broken pipe had ended it."""
    read, write = os.pipe()
    os.close(read)
    try:
        assert ended(words, write, unbuffered) == (141, "")
    finally:
        os.close(write)


@PRINTING
def test_a_full_disk_ends_it_with_a_line(words: str, unbuffered: str) -> None:
    """argparse by itself would call a help shown that was not; and there was a traceback for the others."""
    with open("/dev/full", "wb") as full:
        line = f"chunkserve {words.split()[0]}: write error: No space left on device\n"
        assert ended(words, full.fileno(), unbuffered) == (1, line)


def ended(words: str, output: int, unbuffered: str) -> tuple[int, str]:
    """Return a command's status, and what it printed on standard error. `prepare` also says there what it has done."""
    done = subprocess.run(
        [*COMMAND, *words.split()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=environment({"PYTHONUNBUFFERED": unbuffered}),
        cwd=ROOT,
        check=False,
    )
    lines = done.stderr.splitlines(keepends=True)
    return done.returncode, "".join(line for line in lines if not line.startswith("Model smollm2"))


def test_a_standard_error_that_takes_nothing_is_a_failure_as_well() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "check", "no.yaml"], stdout=subprocess.PIPE, stderr=full, env=environment(), check=False
        )
    assert (done.returncode, done.stdout) == (1, b"")


# --- version ----------------------------------------------------------------------------------------------------------


def test_version_shows_the_commit_and_what_it_runs_on() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    first, python, torch, ray = chunkserve("version").stdout.splitlines()
    assert first == f"chunkserve 0.1.0, commit {commit}"
    assert python == f"Python {sys.version.partition(' ')[0]}"
    assert re.fullmatch(r"torch \d+\.\d+.*", torch)
    assert ray == "ray 2.60.0"
    assert chunkserve("--version").stdout.startswith("chunkserve 0.1.0, commit ")
    assert "unrecognized arguments: x" in chunkserve("--version", "x").stderr


@pytest.mark.parametrize(
    ("origin", "commit"),
    [
        ({"url": "https://example.com/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}, "abc123"),
        ({"url": "file:///x.whl", "archive_info": {}}, None),
        (None, None),
    ],
)
def test_outside_a_checkout_the_commit_is_what_the_package_was_installed_from(
    origin: dict[str, Any] | None, commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        @staticmethod
        def read_text(name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(version, "distribution", lambda name: Installed)
    assert version.commit_of(tmp_path) == commit


def test_a_package_that_is_not_there_is_said_to_be_missing() -> None:
    assert version.release("no-such-package-of-anybody") == "not installed"


# --- keys and prepare -------------------------------------------------------------------------------------------------


def test_keys_prints_a_key_and_its_entry() -> None:
    key, entry, _ = (line.partition(":  ")[2].strip() for line in chunkserve("keys", "ann").stdout.splitlines())
    (of_list,) = yaml.safe_load(entry)
    read = ApiKey.model_validate(of_list)
    assert (read.tenant, read.sha256) == ("ann", digest(key.encode()))


def test_prepare_prints_the_directory_of_a_model_and_nothing_else() -> None:
    done = chunkserve("prepare", "smollm2-135m-instruct")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.rstrip("\n")) / "config.json").is_file()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("smollm3", "No model 'smollm3': expected an existing directory"),
        ("nowhere.gguf", "nowhere.gguf is not there: expected a GGUF file."),
        (".", "is not a model directory: it has no config.json, tokenizer.json, *.safetensors"),
    ],
)
def test_prepare_refuses_what_is_no_model_in_a_line(model: str, line: str, tmp_path: Path) -> None:
    said = refusal("prepare", model, cwd=tmp_path)
    assert said.startswith("chunkserve prepare: ")
    assert line in said


def test_subcommands_that_the_documentation_shows_are_there() -> None:
    commands = [command for one in BLOCKS if one.kind == "bash" for command in one.commands]
    shown = {command.split()[1] for command in commands if command.startswith(".venv/bin/chunkserve ")}
    assert shown
    assert shown <= COMMANDS.keys()
