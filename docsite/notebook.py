"""Runs the library's notebook, and renders it as a page of the site.
Never changes its code or its words: `python -m docsite.notebook` only writes what its cells print."""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "library.ipynb"
VARIES = "varies"
"""The tag of a cell whose output is the model's own words, which may differ between processors."""

Cell = dict[str, Any]


def cells(path: Path = NOTEBOOK) -> list[Cell]:
    found: list[Cell] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


def shown(cell: Mapping[str, Any]) -> str:
    """Return what a cell prints, as the notebook has it."""
    return "".join("".join(output["text"]) for output in cell.get("outputs", ()))


def run(notebook: list[Cell]) -> list[str]:
    """Run the cells as Jupyter does: in one namespace, on a running event loop, with `await` outside of functions.

    Returns:
        What each cell prints; empty for text.
    """
    return asyncio.run(_run(notebook))


async def _run(notebook: list[Cell]) -> list[str]:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(notebook):
        out = io.StringIO()
        if cell["cell_type"] == "code":
            code = compile(source(cell), f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with redirect_stdout(out):
                result = eval(code, names)
                if inspect.isawaitable(result):
                    await result
        printed.append(out.getvalue())
    return printed


def render() -> str:
    """Render the page as Markdown."""
    return "\n\n".join(part for cell in cells() for part in _parts(cell))


def _parts(cell: Cell) -> list[str]:
    if cell["cell_type"] == "markdown":
        return [source(cell).strip()]
    parts = [f"```python\n{source(cell).strip()}\n```"]
    return [*parts, f"```text\n{shown(cell).strip()}\n```"] if shown(cell).strip() else parts


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m docsite.notebook", description="Run the library's notebook, and write what its cells print."
    ).parse_args()
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell, text in zip(content["cells"], run(content["cells"]), strict=True):
        if cell["cell_type"] == "code":
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    NOTEBOOK.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
