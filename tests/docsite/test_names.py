"""Owns the promise that a name which the documentation uses, or by which code refers to it, is one that there is.
Never looks at links; the build of the site does."""

from __future__ import annotations

import re
import subprocess

import pytest

from docsite import reference
from docsite.pages import DOCS, ROOT
from serve_app.metrics.catalogue import BY_NAME, MISSING

TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PAGES = [name for name in TRACKED if name.endswith(".md") and name != "CHANGELOG.md"]
CODE = [name for name in TRACKED if name.endswith((".py", ".yaml", ".sh", ".h", ".cpp", "Makefile"))]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_metric_that_a_page_names_is_in_a_scrape() -> None:
    """Regression: one was named without the `_total` of a counter."""
    scraped = {f"{one.name}_total" if one.kind == "counter" else one.name for one in BY_NAME.values()} | {MISSING}
    named = {
        (name, metric) for name in PAGES for metric in re.findall(r"`((?:chunkserve|vllm):\w*[a-z0-9])[`{]", read(name))
    }
    assert len(named) > 50
    assert sorted((name, metric) for name, metric in named if metric not in scraped) == []


def test_what_helps_a_slow_request_is_a_setting() -> None:
    """Regression: a parameter of a class was named, which no config takes."""
    causes = read("docs/how-to/why-slow.md").partition("## Causes")[2]
    helps = " ".join(re.findall(r"^\| `\w+` \|.*\|(.*)\|$", causes, re.MULTILINE))
    settings = set(re.findall(r"^\| `(\w+)` \|", reference.render(), re.MULTILINE))
    named = set(re.findall(r"`(\w+)`", helps))
    assert len(named) > 3
    assert sorted(named - settings) == []


@pytest.mark.parametrize(
    ("page", "place"), [("engine/models/README.md", "engine/models"), ("tests/support/README.md", "tests/support")]
)
def test_a_page_about_a_folder_has_a_line_for_each_of_its_files(page: str, place: str) -> None:
    files = [path.name for path in sorted((ROOT / place).glob("*.py")) if path.name != "__init__.py"]
    assert len(files) > 20
    assert [name for name in files if f"`{name}`" not in read(page)] == []


def test_every_page_that_code_names_is_there() -> None:
    place = rf"\b{DOCS.name}/(?:how-to|tutorials|reference|explanation|benchmarks)/[\w-]+\.md"
    named = {(name, page) for name in CODE for page in re.findall(place, read(name))}
    assert len(named) > 20
    assert sorted((name, page) for name, page in named if not (ROOT / page).is_file()) == []
