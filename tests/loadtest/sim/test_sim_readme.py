"""loadtest/sim/README.md is executed, with shorter loads.
For what takes hours, only the command that make would run is checked."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from loadtest import load as live
from loadtest.options import plan_from
from loadtest.server import ROOT
from loadtest.sim import against, load
from loadtest.sim.plots import README
from loadtest.sim.specs import STUDIES
from loadtest.sim.studies import main
from loadtest.slo import PASSED
from tests.loadtest.test_loadtest_readme import real

COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    for line in block.splitlines()
]
LONG = [command for command in COMMANDS if command.startswith("make studies")]
LOADS = [command for command in COMMANDS if command.startswith("make simulate")]
LIVE = [command for command in COMMANDS if command.startswith("make load") or "loadtest.sim.against" in command]
STUDIED = [command for command in COMMANDS if command not in LONG + LOADS + LIVE]


@pytest.mark.parametrize("command", LOADS)
def test_a_load_of_the_page_is_simulated_and_passes(command: str, tmp_path: Path) -> None:
    program, *given = real(command)
    assert (program, given[:2]) == (".venv/bin/python", ["-m", "loadtest.sim.load"])
    with pytest.raises(SystemExit) as ended:
        load.main([*given[2:], "--seconds", "5", "--goal", "", "--seed", "1", "--out", str(tmp_path)])
    assert ended.value.code == PASSED
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_what_is_asked_live_is_what_can_be_simulated_and_its_report_what_is_read() -> None:
    asked, compared = LIVE
    program, *given = real(asked)
    assert (program, given[:2]) == (".venv/bin/python", ["-m", "loadtest.load"])
    options = live.parser().parse_args(given[2:])
    live.check(options)
    again = load.parser().parse_args(live.without(given[2:], ["--url"]))
    assert load.check(again)[0] == plan_from(options)
    program, *given = shlex.split(compared)
    assert (program, given[:2]) == (".venv/bin/python", ["-m", "loadtest.sim.against"])
    assert against.parser().parse_args(given[2:]).report == Path(options.out) / "report.json"


@pytest.mark.parametrize("command", STUDIED)
def test_a_study_of_the_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = shlex.split(command)
    assert given[:3] == [".venv/bin/python", "-m", "loadtest.sim.studies"]
    monkeypatch.chdir(tmp_path)
    main(given[3:])
    results, *_ = (tmp_path / "loadtest" / "runs").glob("*.json")
    policies = results.read_text().count('"policy"')
    assert len(list(tmp_path.glob("loadtest/runs/*/report.html"))) == policies > 1


@pytest.mark.parametrize("command", LONG)
def test_what_takes_long_is_a_study_with_its_tables_and_plots(command: str) -> None:
    given = [*shlex.split(command), "-n", "-o", ".venv/installed"]
    said = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "loadtest.sim.plots" in said
    (studies,) = re.findall(r"for study in ([\w ]+); do", said)
    assert studies.split() == (["routing"] if "STUDY=routing" in command else list(STUDIES))
    assert ("$study --seeds 1" in said) == ("--seeds 1" in command)
