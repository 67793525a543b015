"""Owns the report of several runs of the hour on one card: python -m tests.gpu.hour.report FOLDER ... --out FILE.
Never measures: it reads what the runs kept, and compares steps with the best peaks of all of them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write_whole
from tests.gpu.hour.phases import LARGE, OVER_NARROW

Cell = dict[str, Any]
CONTIGUOUS = "torch's attention on contiguous K and V"


def report(folders: Sequence[Path]) -> dict[str, Any]:
    """Return one document of the results in these folders, which `table` renders.

    Raises:
        ValueError: none of them has the part `machine`.
    """
    results = [result for folder in folders for result in _results(folder)]
    machines = [result for result in results if "device" in result and "peaks" in result and "cells" not in result]
    benches = [result for result in results if result.get("benchmark") == "engine_device"]
    if not machines:
        raise ValueError(f"{', '.join(map(str, folders))}: expected a result of the part machine of the phase right.")
    every = [result["peaks"] for result in (*machines, *benches)]
    peaks = {name: max(peak[name] for peak in every) for name in every[0]}
    machine = machines[0]
    of_attention = (cell for result in results if "benchmark" not in result for cell in result.get("cells", ()))
    return {
        "benchmark": "first_hour",
        **machine["mode"],
        "cores": machine["cores"],
        "packages": machine["packages"],
        "peaks": peaks,
        "cells": _last((cell for bench in benches for cell in _against(peaks, bench)), "model", "cell", "size"),
        "attention": _last((cell for cell in of_attention if _of_packages(cell)), "shape", "by"),
        "tests": _outcomes(test for result in results for test in result.get("tests", ())),
    }


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if "tests" in document or "cells" in document:  # of a pytest run, a part or a benchmark alone
            yield document
        yield from (result for part in document.get("parts", ()) for result in part["results"] if result)


def _against(peaks: dict[str, float], bench: dict[str, Any]) -> Iterator[Cell]:
    """Yield a benchmark's cells with floors by `peaks` in place of its own."""
    for cell in bench["cells"]:
        if cell["cell"] in ("decode", "host_gap"):
            scale = bench["peaks"]["copy_gb_s"] / peaks["copy_gb_s"]
        else:
            scale = bench["peaks"]["matrix_gflop_s"] / peaks["matrix_gflop_s"] if cell["cell"] == "prefill" else 1.0
        floor = {"least_ms": cell["least_ms"] * scale} if "least_ms" in cell else {}
        yield {"model": bench["model"], **cell, **floor}


def _last(cells: Iterable[Cell], *names: str) -> list[Cell]:
    """Return each cell once: of what was measured again, the last counts, by folders and then by files' names."""
    return list({tuple(cell.get(name) for name in names): cell for cell in cells}.values())


def _of_packages(cell: Cell) -> bool:
    """Whether attention was timed in the engine's own configuration, and not in a sweep over others."""
    return "by" in cell and "us" in cell and "block_size" not in cell


def _outcomes(tests: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count outcomes by file. A test that ran again counts by its last outcome."""
    last = {test["test"]: test["outcome"] for test in tests}
    found: dict[str, Counter[str]] = {}
    for name, outcome in sorted(last.items()):
        found.setdefault(name.partition("::")[0], Counter())[outcome] += 1
    return {name: dict(sorted(counts.items())) for name, counts in found.items()}


def table(document: dict[str, Any]) -> str:
    """Render the tables of docs/benchmarks/gpu.md."""
    peaks = document["peaks"]
    lines = [
        f"{document['device']}, torch {document['torch']}, Triton {document['triton']}: a copy moves "
        f"{peaks['copy_gb_s'] / 1000:.2f} TB/s, and a product of bfloat16 matrices does "
        f"{peaks['matrix_gflop_s'] / 1000:.0f} TFLOP/s.",
        "",
        "| 8B in bfloat16 | floor, ms | took, ms | times the floor |",
        "|---|--:|--:|--:|",
    ]
    for cell in (cell for cell in document["cells"] if cell["model"] == LARGE):
        if cell["cell"] in ("decode", "prefill"):
            rows = "row" if cell["size"] == 1 else "rows"
            what = f"{rows} of 1,024 tokens" if cell["cell"] == "decode" else "tokens of a prompt"
            name = f"{cell['cell']}, {cell['size']:,} {what}"
            lines.append(_row(name, cell["least_ms"], cell["device_ms"], cell["device_ms"] / cell["least_ms"]))
        elif cell["cell"] == "host_gap":
            name = f"the whole loop, {cell['size']} rows; the host's gap is {cell['percent']:.1f} %"
            lines.append(_row(name, cell["least_ms"], cell["loop_ms"], cell["loop_ms"] / cell["least_ms"]))
    lines += [
        "",
        "| attention of a layer, µs | Triton | over int8 | over fp8 | torch, contiguous |",
        "|---|--:|--:|--:|--:|",
    ]
    by_shape: dict[str, dict[str, float]] = {}
    for cell in document["attention"]:
        by_shape.setdefault(cell["shape"], {})[cell["by"]] = cell["us"]
    names = ("triton", f"triton{OVER_NARROW}int8", f"triton{OVER_NARROW}fp8", CONTIGUOUS)
    for shape, times in by_shape.items():
        lines.append(f"| {shape} | {' | '.join(f'{times[name]:.0f}' if name in times else '' for name in names)} |")
    lines += ["", "| GPU tests | passed | failed | skipped |", "|---|--:|--:|--:|"]
    for name, counts in document["tests"].items():
        numbers = " | ".join(str(counts.get(word, 0)) for word in ("passed", "failed", "skipped"))
        lines.append(f"| `{Path(name).name}` | {numbers} |")
    return "\n".join(lines)


def _row(name: str, floor: float, took: float, ratio: float) -> str:
    return f"| {name} | {floor:.2f} | {took:.2f} | {ratio:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.hour.report",
        description="Make one document of the results that runs of tests/gpu/first_hour.py left in these folders, with "
        "floors by the best peaks of all of them, and print the tables of docs/benchmarks/gpu.md.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what --out of a run was")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args(arguments)
    try:
        document = report(options.folders)
    except ValueError as error:
        parser.error(str(error))
    if options.out:
        write_whole(options.out, document)
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
