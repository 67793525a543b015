"""loadtest/README.md is executed: commands that need no cluster run for a shorter time, on a scripted server."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.find_rate import options_of
from loadtest.load import check, parser
from loadtest.server import ROOT
from loadtest.slo import PASSED
from loadtest.workloads import WORKLOADS
from tests.loadtest.fake_openai import FakeServer, listening
from tests.loadtest.loads import LENIENT, run

pytestmark = [pytest.mark.anyio, pytest.mark.server]

README = (ROOT / "loadtest" / "README.md").read_text()
TRACES = Path(__file__).parent / "traces"
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
ON_A_CLUSTER = [command for command in COMMANDS if "kubectl" in command]
TOGETHER = [command for command in COMMANDS if "--expect-workers" in command or "--worker-of" in command]
"""A master and its worker, which test_load.py runs."""
RUN = [command for command in COMMANDS if command not in ON_A_CLUSTER + TOGETHER]
QUICK = [command for command in RUN if command == "make load" or "locust " in command]
"""For the others `make test` checks only the options; `make test-slow` runs them too, for two minutes in all."""

SHORTER = {
    "smoke": "--seconds 2 --rate 4",
    "sweep": "--seconds 1 --clients 2 --lengths 0.005",
    "rates": "--seconds 2 --rates 3,6 --lengths 0.02",
    "trace": "--seconds 2 --rate 5",
    "sessions": "--seconds 3 --clients 2 --lengths 0.05",
    "prefix": "--seconds 2 --rate 30 --lengths 0.02",
    "interference": "--seconds 2 --rate 5 --lengths 0.02",
    "cancel": "--seconds 2 --rate 12",
    "slow-readers": "--seconds 2 --rate 4 --clients 2 --lengths 0.01",
    "overload": "--seconds 2 --rate 4 --lengths 0.02",
    "step": "--seconds 2 --rate 4 --lengths 0.02",
    "burst": "--seconds 2 --rate 4 --lengths 0.02",
    "tenants": "--seconds 2 --rate 4 --lengths 0.02",
    "soak": "--seconds 2 --rate 4 --lengths 0.02",
}
SEARCH = "--seconds 2 --lengths 0.02 --arrivals constant --start 2 --most 4 --precision 1"


def real(command: str) -> list[str]:
    """Return the command that make would run."""
    if not command.startswith("make "):
        return shlex.split(command)
    given = [*shlex.split(command), "-n", "-o", ".venv/installed"]
    said = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in said.splitlines() if "loadtest." in line]
    by_shell = shlex.shlex(line, posix=True, punctuation_chars="<>|&;")
    by_shell.whitespace_split = True
    assert list(by_shell) == shlex.split(line), "the shell would redirect"
    return shlex.split(line)


def scenario_of(command: list[str]) -> str:
    return command[command.index("--scenario") + 1]


def shorter(command: list[str]) -> list[str]:
    if "loadtest.find_rate" in command:
        return shlex.split(SEARCH)
    return [*shlex.split(SHORTER[scenario_of(command)]), *a_trace_that_is_here(command)]


def a_trace_that_is_here(command: list[str]) -> list[str]:
    if "--trace" not in command:
        return []
    name = command[command.index("--trace") + 1]
    return ["--trace", str(TRACES / ("mooncake_sample.jsonl" if "mooncake" in name else "azure_sample.csv"))]


@pytest.mark.parametrize(
    "command", [command if command in QUICK else pytest.param(command, marks=pytest.mark.slow) for command in RUN]
)
async def test_a_command_of_the_readme_runs_and_passes(command: str, tmp_path: Path) -> None:
    program, *arguments = real(command)
    assert program in (".venv/bin/python", ".venv/bin/locust")
    if program.endswith("locust"):
        arguments = ["-m", "locust", *arguments]
    async with listening(FakeServer(step_s=0.005)) as port:
        url = ["--host" if "locust" in program else "--url", f"http://127.0.0.1:{port}"]
        own = [*url, "--out", str(tmp_path), "--seed", "1", *LENIENT, *shorter(arguments)]
        found = await run([sys.executable, *arguments, *own], tmp_path)
    assert found.code == PASSED, found.output
    assert "<svg" in found.page


@pytest.mark.parametrize("command", [command for command in RUN + ON_A_CLUSTER if "locust " not in command])
def test_the_options_of_a_command_make_a_load(command: str) -> None:
    _, _, module, *options = real(command)
    if module == "loadtest.find_rate":
        assert options_of(options).scenario == "rates"
    else:
        check(parser().parse_args([*options, *a_trace_that_is_here(options)]))


def test_every_scenario_is_described_and_has_a_command() -> None:
    for name, workload in WORKLOADS.items():
        assert f"| `{name}` | {workload.about} |" in README
    shown = {scenario_of(real(command)) for command in RUN if "find" not in command}
    assert shown | {scenario_of(real(command)) for command in ON_A_CLUSTER} == set(WORKLOADS)
    assert set(SHORTER) == {name for name, workload in WORKLOADS.items() if not workload.needs_command}


def test_a_master_and_a_worker_are_what_the_readme_shows() -> None:
    master, worker = TOGETHER
    assert "--expect-workers 1" in master
    check(parser().parse_args(real(master)[3:]))
    check(parser().parse_args(real(worker)[3:]))
