"""Owns the proof that docs/how-to/agents.md is true of the programs that `make test-clients` runs.
Never runs one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients.client_docs import SHOWN_MODEL, SHOWN_URL, sections, settings_of
from tests.clients.programs import ALL, PROGRAMS

CLIENTS = Path(__file__).parent
TRIED = {program.section for program in ALL.values() if program.section is not None}
WITHOUT_A_PROGRAM = {"Continue", "Zed", "Open WebUI"}


def pins() -> dict[str, str]:
    pinned = dict(json.loads((CLIENTS / "package.json").read_text())["dependencies"])
    for name in ("requirements.txt", "requirements-aider.txt"):
        pinned |= dict(re.findall(r"^([\w.-]+)==(\S+)$", (CLIENTS / name).read_text(), flags=re.M))
    return pinned


def test_what_is_said_to_be_tried_is_run_and_nothing_else_is() -> None:
    told = {title for title, text in sections().items() if re.search(r"^Tried: ", text, flags=re.M)}
    assert told == TRIED
    told_not = {title for title, text in sections().items() if "Not tried" in text}
    assert told_not == WITHOUT_A_PROGRAM


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.package is not None])
def test_a_section_names_the_version_and_the_command_that_are_run(name: str) -> None:
    program = PROGRAMS[name]
    assert program.section is not None
    assert program.package is not None
    tried = f"Tried: `{program.package}` {pins()[program.package]}, with `{program.command[0]} "
    text = sections()[program.section]
    assert tried in text
    shown = text.partition(tried)[2].partition("`")[0]
    assert shown in program.command


@pytest.mark.parametrize("section", sorted(TRIED | WITHOUT_A_PROGRAM))
def test_settings_name_the_server_and_the_model(section: str) -> None:
    shown = settings_of(section)
    text = shown.exports + "".join(shown.files.values())
    assert SHOWN_URL in text
    assert SHOWN_MODEL in text or section == "Open WebUI"
    there = shown.at("http://127.0.0.1:1234", "other")
    text = there.exports + "".join(there.files.values())
    assert SHOWN_URL not in text
    assert SHOWN_MODEL not in text
    for path, content in there.files.items():
        if path.endswith(".json"):
            json.loads(content)


def test_the_lock_names_no_registry_and_pins_what_package_json_pins() -> None:
    lock = json.loads((CLIENTS / "package-lock.json").read_text())
    assert lock["packages"][""]["dependencies"] == json.loads((CLIENTS / "package.json").read_text())["dependencies"]
    assert not any("resolved" in package for package in lock["packages"].values())
    assert all("integrity" in package for name, package in lock["packages"].items() if name)
