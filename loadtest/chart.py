"""Owns the chart of the comparison with peers, an SVG that reads in light and dark, and README's tables of it.
Never computes a figure: loadtest/comparison.py does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from loadtest.comparison import OURS, ROWS, Document, Row, Spread, figure, table
from loadtest.peer_servers import SERVERS
from loadtest.peers import RESULTS
from loadtest.server import ROOT

CHART = ROOT / "docs" / "peers.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- peers -->", "<!-- end of peers -->"

PANELS = [row for row in ROWS if row.scenario and (row.scenario, row.figure) != ("closed", "ttft_ms")]
COLUMNS = 3
WIDTH, HEAD, BAR, MARGIN = 310, 46, 24, 10  # of a panel, its heading, a bar with the space around it; in pixels
LABEL, VALUE = 132, 48  # what a server's name and a value take

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .note { fill: #59636e; font-size: 11px } .value { text-anchor: end }
.bar { fill: #afb8c1 } .ours { fill: #0969da } .whisker { stroke: #1f2328; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 }
  .bar { fill: #57606a } .ours { fill: #4493f8 } .whisker { stroke: #e6edf3 }
}
"""


def svg(document: Document) -> str:
    """A panel for each scenario's figures, and in it a bar for each server: the median, whiskers from least to most."""
    height = HEAD + BAR * len(document["servers"]) + MARGIN
    rows = -(-len(PANELS) // COLUMNS)
    size = f'width="{COLUMNS * WIDTH}" height="{rows * height}" viewBox="0 0 {COLUMNS * WIDTH} {rows * height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{_STYLE}</style>"]
    lines.append(f"<title>chunkserve and its peers on {escape(document['cpu'])}</title>")
    for i, row in enumerate(PANELS):
        lines.append(f'<g transform="translate({i % COLUMNS * WIDTH} {i // COLUMNS * height})">')
        lines += _panel(document, row)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(document: Document, row: Row) -> Iterator[str]:
    found = {name: figure(document, name, row) for name in document["servers"]}
    longest = max((spread[2] for spread in found.values() if spread), default=1.0)
    yield _text(MARGIN, 18, row.title, "title")
    yield _text(MARGIN, 34, "more is better" if row.more_is_better else "less is better", "note")
    for i, (name, spread) in enumerate(found.items()):
        yield from _bar(name, spread, HEAD + i * BAR, (WIDTH - LABEL - VALUE - 2 * MARGIN) / longest, row.digits)


def _bar(name: str, spread: Spread | None, top: int, scale: float, digits: int) -> Iterator[str]:
    """`scale`: pixels a unit."""
    middle = top + BAR // 2
    yield _text(MARGIN, middle + 4, SERVERS[name].title, "")
    if spread is None:
        yield _text(MARGIN + LABEL, middle + 4, "not measured", "note")
        return
    median, least, most = (value * scale for value in spread)
    left, kind = MARGIN + LABEL, "ours" if name == OURS else "bar"
    yield f'<rect class="{kind}" x="{left}" y="{top + 4}" width="{median:.1f}" height="{BAR - 8}" rx="2"/>'
    yield _whisker(left + least, left + most, middle)
    yield _text(WIDTH - MARGIN, middle + 4, f"{spread[0]:.{digits}f}", "value")


def _whisker(least: float, most: float, y: int) -> str:
    ends = f"M{least:.1f} {y - 4}v8M{most:.1f} {y - 4}v8"
    return f'<path class="whisker" d="M{least:.1f} {y}H{most:.1f}{ends}"/>'


def _text(x: int, y: int, text: str, kind: str) -> str:
    of_class = f' class="{kind}"' if kind else ""
    return f'<text{of_class} x="{x}" y="{y}">{escape(text)}</text>'


def with_tables(readme: str, document: Document) -> str:
    """README with the tables between their marks written anew.

    Raises:
        ValueError: the marks are not there, once each.
    """
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.chart", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=CHART)
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    document = json.loads(options.results.read_text())
    options.out.write_text(svg(document))
    options.readme.write_text(with_tables(options.readme.read_text(), document))


if __name__ == "__main__":
    main()
