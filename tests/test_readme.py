"""README is short, its links lead somewhere, and its figures are those that are kept.
Its blocks are run by tests/docsite."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 200
HEADINGS = re.findall(r"^## (.+)$", README, re.MULTILINE)
LINKS = sorted(set(re.findall(r"\]\((?!http)([^)]+)\)", README)))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_its_contents_list_has_every_section() -> None:
    assert re.findall(r"^- \[(.+)\]\(#.+\)$", README, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("link", LINKS)
def test_every_link_leads_to_something(link: str) -> None:
    path, _, anchor = link.partition("#")
    assert (ROOT / path).exists()
    if anchor and not path:
        assert anchor in {heading.lower().replace(" ", "-") for heading in HEADINGS}


def test_every_place_names_the_same_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"])
    assert found
    least, beyond = map(int, found.groups())
    *firsts, last = [f"3.{minor}" for minor in range(least, beyond)]
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert named == [*firsts, last]
    pages = ["README.md", "Makefile", "docs/tutorials/first-server.md", "docs/how-to/install.md"]
    for page in pages:
        assert f"Python {', '.join(firsts)} or {last}" in (ROOT / page).read_text(encoding="utf-8"), page
    assert f"(3, {least}) <= sys.version_info[:2] <= (3, {beyond - 1})" in (ROOT / "Makefile").read_text()


def test_the_two_commands_stand_first() -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", README.partition("## A first request")[0], re.DOTALL)
    assert [line.split()[:2] for line in commands.splitlines()] == [["make", "serve"], ["make", "test"]]
