"""Owns the chart of the comparison with peers, an SVG for light and dark pages, and its tables in the docs.
Never computes a figure: benchmarks/peers/comparison.py does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.comparison import OURS, OURS_NO_DRAFTS, ROWS, Document, Row, figure, table
from benchmarks.peers.run import RESULTS
from benchmarks.peers.servers import SERVERS
from loadtest.marks import with_text
from loadtest.panels import Panel, bars, document
from loadtest.server import ROOT

CHART = ROOT / "docs" / "peers.svg"
PAGE = ROOT / "docs" / "benchmarks" / "peers.md"
MARK = "peers"

PANELS = [row for row in ROWS if row.scenario and (row.scenario, row.figure) != ("closed", "ttft_ms")]


def svg(results: Document) -> str:
    """Draw a panel for each figure, with a bar for each server: the median, with whiskers from minimum to maximum."""
    panels = [_panel(results, row) for row in PANELS]
    return document(f"chunkserve and its peers on {results['cpu']}", panels, columns=3)


def _panel(results: Document, row: Row) -> Panel:
    found = {SERVERS[name].title: figure(results, name, row) for name in results["servers"]}
    note = "more is better" if row.more_is_better else "less is better"
    return bars(row.title, note, found, row.digits, ours=[SERVERS[name].title for name in (OURS, OURS_NO_DRAFTS)])


def with_tables(page: str, results: Document) -> str:
    """Return the page with the tables between their marks replaced.

    Raises:
        ValueError: each mark must occur exactly once, and does not.
    """
    return with_text(page, MARK, table(results))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.chart",
        description="Draw the chart of the comparison with other servers, an SVG, and write its tables into the "
        "documentation.",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file with the results of benchmarks.peers.run")
    parser.add_argument("--out", type=Path, default=CHART, help="file for the chart")
    parser.add_argument("--page", type=Path, default=PAGE, help="page whose tables are written")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    options.out.write_text(svg(results))
    options.page.write_text(with_tables(options.page.read_text(), results))


if __name__ == "__main__":
    main()
