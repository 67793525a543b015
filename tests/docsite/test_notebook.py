"""The library's notebook is run, and what it shows is what it prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from docsite.notebook import NOTEBOOK, VARIES, cells, run, shown, source
from docsite.pages import DOCS, ROOT
from tests.support.chunkserve import environment

PRINTED = """
import json, sys
from docsite.notebook import cells, run
out = run(cells())
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Run all cells in a process of its own, with the default model."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_cell_prints_what_the_notebook_shows(printed: list[str]) -> None:
    """The asserts in the cells hold, too. The model's own words may differ between processors."""
    for cell, text in zip(cells(), printed, strict=True):
        if VARIES in cell["metadata"].get("tags", ()):
            assert text.strip(), source(cell)
        else:
            assert text == shown(cell), source(cell)


def test_a_cell_that_fails_fails_the_run() -> None:
    def code(text: str) -> dict[str, object]:
        return {"cell_type": "code", "source": [text]}

    assert run([code("x = 1"), code("import asyncio\nawait asyncio.sleep(0)\nprint(x)")]) == ["", "1\n"]
    with pytest.raises(AssertionError):
        run([code("x = 1"), code("assert x == 2")])


def test_the_notebook_is_one_that_jupyter_opens() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 4)
    for cell in content["cells"]:
        needed = {"cell_type", "metadata", "source"}
        needed |= {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == needed
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        for output in cell.get("outputs", ()):
            assert (output["output_type"], output["name"]) == ("stream", "stdout")


def test_the_page_has_every_cell_and_its_output() -> None:
    page = (DOCS / "tutorials" / "library.md").read_text(encoding="utf-8")
    assert all(source(cell).strip() in page and shown(cell).strip() in page for cell in cells())
    assert "library.ipynb" in page
