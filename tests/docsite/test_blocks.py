"""The documentation is executed: a command or a snippet that no test runs is a claim.
Never runs what needs a cluster, a GPU or hours; each of those has its reason here."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docsite.commands import ROOT
from loadtest import load as live
from loadtest.find_rate import options_of
from loadtest.server import Server
from loadtest.sim import load as simulated
from loadtest.slo import PASSED
from serve_app.api.openapi.operations import OPERATIONS, Operation
from serve_app.api.requests.schema import parse_request
from serve_app.settings.application import AppSettings
from serve_app.settings.auth import ApiKey
from tests.docsite.blocks import BLOCKS, block
from tests.loadtest.test_loadtest_readme import real
from tests.support.forked_commands import Ended, run_forked

pytestmark = pytest.mark.server

ADDRESS = "http://127.0.0.1:8000"
K8S = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

COMMANDS = sorted({command for one in BLOCKS if one.kind == "bash" for command in one.commands})
CURLS = [command for command in COMMANDS if command.startswith("curl ")]
MADE = [command for command in COMMANDS if command.startswith("make ")]
LOADS = [command for command in MADE if command.split()[1] in ("load", "find-rate", "simulate")]
COMPOSE = [command for command in COMMANDS if command.startswith("docker compose ")]  # see tests/compose
ON_A_CLUSTER = [
    command
    for command in COMMANDS
    if command.startswith(("docker ", "helm ", "kind ", "kubectl ")) and command not in COMPOSE
]
PROGRAMS = [command for command in COMMANDS if command.startswith(".venv/bin/python -m ")]
MEASURING = [command for command in PROGRAMS if "--out" in command or "pytest" in command]

RUN_ELSEWHERE = {
    "pip wheel --no-deps --wheel-dir dist .": "tests/test_wheel.py",
    "python3 -m venv venv": "tests/test_wheel_serves.py",
    "venv/bin/pip install torch==2.13.0": "tests/test_wheel_serves.py",
    "venv/bin/pip install dist/chunkserve-0.1.0-py3-none-linux_x86_64.whl": "tests/test_wheel_serves.py",
    "venv/bin/chunkserve serve smollm2-135m-instruct": "tests/test_wheel_serves.py",
    ".venv/bin/serve run config.yaml": "tests/serve_app/test_serve_run.py",
    ".venv/bin/chunkserve serve smollm2-135m-instruct --port 8001": "tests/serve_app/front/command/test_serve.py",
    ".venv/bin/chunkserve check config.yaml --explain": "tests/serve_app/front/command/test_check.py",
    ".venv/bin/chunkserve chat --temperature 0": "tests/serve_app/front/command/test_running.py",
    ".venv/bin/chunkserve status": "tests/serve_app/front/command/test_running.py",
    **{
        command: f"tests/serve_app/front/command/test_{name}.py"
        for name in ("plan", "bench")
        for command in COMMANDS
        if command.startswith(f".venv/bin/chunkserve {name} ")
    },
    ".venv/bin/serve deploy config.yaml": "tests/chaos/test_rollout.py",
    "TRITON_CACHE_DIR=loadtest/runs/kernels python3 -m tests.gpu.hour.ahead": "tests/test_first_hour.py",
    "python3 tests/gpu/first_hour.py --device stand-in --out loadtest/runs/rehearsal": "tests/test_first_hour.py",
}
FIRST_HOUR = "python3 tests/gpu/first_hour.py --out loadtest/runs/gpu"
NOT_RUN = {
    **{
        FIRST_HOUR + arguments: "it needs a GPU"
        for arguments in (
            "",
            " --phases right",
            " --phases where",
            " --phases aims",
            " --phases aims --parts steps loop --minutes 5",
            " --phases right --parts machine kernels engine --minutes 6",
            " --phases right --parts precompile tiers engine --minutes 7",
            " --phases aims --parts owner-by-graphs batch-invariant --minutes 4",
            " --phases where --parts operations-ahead operations --minutes 3",
            ' --phases rest --again steps --prediction "64 rows: 8.1 to 6.9 ms"',
        )
    },
    "python3 -m pytest -n 0 tests/gpu/test_ranks.py": "it needs two GPUs",
    ".venv/bin/pip install --force-reinstall torch==2.13.0 --index-url INDEX": "it downloads torch for a GPU",
}
CONFIGS = [one.text for one in BLOCKS if one.kind == "yaml"]


def run(command: list[str], timeout_s: float = 180) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {one.kind for one in BLOCKS} == {"bash", "python", "yaml"}


def test_every_command_is_run_here_or_elsewhere_or_has_a_reason() -> None:
    known = {*CURLS, *MADE, *COMPOSE, *ON_A_CLUSTER, *PROGRAMS, *RUN_ELSEWHERE, *NOT_RUN}
    assert known == set(COMMANDS)
    assert all((ROOT / place).is_file() for place in RUN_ELSEWHERE.values())


# --- requests ---------------------------------------------------------------------------------------------------------


def operation_of(words: list[str]) -> Operation:
    (url,) = [word for word in words if word.startswith(ADDRESS)]
    asks = "get" if not {"-d", "-X"} & set(words) else "post"
    (found,) = [one for one in OPERATIONS if (one.method, one.path) == (asks, url.removeprefix(ADDRESS))]
    return found


@pytest.mark.parametrize("command", CURLS)
def test_a_request_asks_a_route_that_there_is_with_a_body_that_it_takes(command: str) -> None:
    words = shlex.split(command)
    operation = operation_of(words)
    if operation.body is None:
        assert "-d" not in words
    else:
        parse_request(operation.body, words[words.index("-d") + 1].encode())
    if operation.needs == "admin key":
        assert "Authorization: Bearer $ADMIN_KEY" in words


def test_the_first_request_answers_with_paris(default_server: Server) -> None:
    answer = json.loads(
        run(["bash", "-c", block("bash", "capital of France").text.replace(ADDRESS, default_server.url)])
    )
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_the_structured_answer_has_the_fields_of_its_schema(default_server: Server) -> None:
    text = block("bash", "json_schema").text.replace(ADDRESS, default_server.url)
    answer = json.loads(run(["bash", "-c", text]))
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"city", "country"}


def test_the_openai_example_prints_a_story_as_it_is_written(default_server: Server) -> None:
    story = run([sys.executable, "-c", block("python", "openai").text.replace(ADDRESS, default_server.url)])
    assert len(story.split()) > 30


def test_the_engines_example_prints_scheduled_tokens_and_finished() -> None:
    lines = run([sys.executable, "-c", block("python", "build_engine").text]).splitlines()
    assert [line.partition("(")[0] for line in lines] == ["Scheduled", *["Token"] * (len(lines) - 2), "Finished"]
    assert len(lines) > 3


def test_the_library_prints_an_answer_and_a_story() -> None:
    said = run([sys.executable, "-c", block("python", "from chunkserve").text])
    answer, _, story = said.partition("\n")
    assert "Paris" in answer
    assert len(story.split()) > 10


def test_every_python_block_is_run_above() -> None:
    marks = ("from openai", "build_engine", "from chunkserve")
    assert all(sum(mark in one.text for mark in marks) == 1 for one in BLOCKS if one.kind == "python")


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_settings_that_are_shown_are_valid_and_say_something(config: str) -> None:
    given = yaml.safe_load(config)
    settings = AppSettings.model_validate(given)
    assert settings.model_dump() != AppSettings().model_dump()


def test_no_key_whose_digest_is_shown_can_be_guessed() -> None:
    """Regression: they were those of `foo` and of `bar`, and whoever copied the block opened its admin routes."""
    shown = {digest for config in CONFIGS for digest in re.findall(r"\b[0-9a-f]{64}\b", config)}
    words = (
        "",
        "a",
        "admin",
        "ann",
        "bar",
        "baz",
        "chunkserve",
        "foo",
        "key",
        "none",
        "password",
        "secret",
        "sk-key",
        "test",
    )
    assert shown
    assert shown.isdisjoint(hashlib.sha256(word.encode()).hexdigest() for word in words)


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", MADE)
def test_a_target_that_is_named_is_in_the_makefile(command: str) -> None:
    assert command.split()[1] in TARGETS


@pytest.mark.parametrize("command", LOADS)
def test_the_options_of_a_load_make_one(command: str) -> None:
    _, _, module, *options = real(command)
    if module == "loadtest.find_rate":
        assert options_of(options).scenario == "rates"
    elif module == "loadtest.load":
        live.check(live.parser().parse_args(options))
    else:
        simulated.check(simulated.parser().parse_args(options))


@pytest.mark.parametrize("command", [command for command in LOADS if command.startswith("make simulate")])
def test_a_simulated_load_passes(command: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        simulated.main([*real(command)[3:], "--seconds", "5", "--goal", "", "--seed", "1", "--out", str(tmp_path)])
    assert ended.value.code == PASSED


@pytest.mark.parametrize("command", ON_A_CLUSTER)
def test_a_command_for_a_cluster_is_one_of_the_manifests_own_page(command: str) -> None:
    """tests/k8s/test_readme.py checks what they name."""
    assert f"\n{command}\n" in K8S


def test_the_key_command_prints_an_entry_for_the_config() -> None:
    (command,) = [command for command in PROGRAMS if "serve_app.auth" in command]
    entry = re.search(r"- .*", run([sys.executable, *shlex.split(command)[1:]]))
    assert entry is not None
    (read,) = yaml.safe_load(entry[0])
    assert ApiKey.model_validate(read).tenant == "ann"


def test_the_prepare_command_prints_the_model_directory() -> None:
    (command,) = [command for command in PROGRAMS if "engine.checkpoints.prepare" in command]
    assert (Path(run([sys.executable, *shlex.split(command)[1:]]).strip()) / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def with_another_option() -> dict[str, Ended]:
    """Run all programs as they are shown, with an option that nobody knows: it ends them before they do anything."""
    groups = [[[*shlex.split(command)[2:], "--no-such-option"]] for command in MEASURING]
    return dict(zip(MEASURING, (one for (one,) in run_forked(groups, ROOT)), strict=True))


@pytest.mark.parametrize("command", MEASURING)
def test_a_program_takes_the_options_that_are_shown(with_another_option: dict[str, Ended], command: str) -> None:
    """The option that nobody knows must be the only one that it complains of."""
    ended = with_another_option[command]
    assert ended.status in (2, 4)
    assert "unrecognized arguments: --no-such-option" in ended.errors


def test_every_program_is_run_above() -> None:
    marks = ("serve_app.auth", "engine.checkpoints.prepare", "--out", "pytest")
    assert all(sum(mark in command for mark in marks) == 1 for command in PROGRAMS)
