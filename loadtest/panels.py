"""Owns pictures of panels side by side, as SVG for light and dark pages: bars with whiskers, coloured points.
Never knows what the panels are about; it is given names and numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape

from loadtest.plots import text

WIDTH, HEIGHT, MARGIN, HEAD, BAR = 330, 250, 12, 44, 24  # of a panel, then within it, in pixels
LABEL, VALUE = 140, 56  # width of a bar's name and of its value
AXIS = 34
COLORS = ("#0969da", "#8250df", "#9a6700", "#bc4c00", "#cf222e", "#57606a", "#1a7f37")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .note { fill: #59636e; font-size: 11px }
.bar { fill: #afb8c1 } .ours { fill: #0969da } .whisker { stroke: #1f2328; fill: none }
.axis { stroke: #59636e; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 } .axis { stroke: #9198a1 }
  .bar { fill: #57606a } .ours { fill: #4493f8 } .whisker { stroke: #e6edf3 }
}
"""

Spread = tuple[float, float, float]
"""The median or mean of several values, then their minimum and maximum."""
Panel = tuple[int, list[str]]
"""The height of the panel, and its SVG elements."""


def document(title: str, panels: Sequence[Panel], columns: int) -> str:
    """Compose a picture of the panels, row by row."""
    tall = max((height for height, _ in panels), default=HEIGHT)
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, rows * tall + HEAD
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>"]
    lines += [f"<title>{escape(title)}</title>", text(MARGIN, 20, title, "title")]
    for i, (_, panel) in enumerate(panels):
        place = f"translate({i % columns * WIDTH} {HEAD - 10 + i // columns * tall})"
        lines += [f'<g transform="{place}">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _heading(title: str, note: str) -> list[str]:
    return [text(MARGIN, 18, title, "title"), text(MARGIN, 34, note, "note")]


def bars(title: str, note: str, values: Mapping[str, Spread | None], digits: int, ours: Collection[str] = ()) -> Panel:
    """Draw a bar for each name, with whiskers from minimum to maximum. None means not measured. `ours` are coloured."""
    longest = max((spread[2] for spread in values.values() if spread), default=0.0) or 1.0
    scale = (WIDTH - LABEL - VALUE - 2 * MARGIN) / longest
    lines = _heading(title, note)
    for i, (name, spread) in enumerate(values.items()):
        top = HEAD + i * BAR
        lines.append(text(MARGIN, top + BAR // 2 + 4, name, ""))
        if spread is None:
            lines.append(text(MARGIN + LABEL, top + BAR // 2 + 4, "not measured", "note"))
        else:
            lines += _bar("ours" if name in ours else "bar", spread, top, scale, digits)
    return HEAD + BAR * len(values) + MARGIN, lines


def _bar(kind: str, spread: Spread, top: int, scale: float, digits: int) -> Iterator[str]:
    """`scale` is the number of pixels for each unit."""
    left, middle = MARGIN + LABEL, top + BAR // 2
    length, least, most = (value * scale for value in spread)
    yield f'<rect class="{kind}" x="{left}" y="{top + 4}" width="{length:.1f}" height="{BAR - 8}" rx="2"/>'
    ends = f"M{left + least:.1f} {middle - 4}v8M{left + most:.1f} {middle - 4}v8"
    yield f'<path class="whisker" d="M{left + least:.1f} {middle}H{left + most:.1f}{ends}"/>'
    yield text(WIDTH - MARGIN, middle + 4, f"{spread[0]:.{digits}f}", "", "end")


Points = Mapping[str, Sequence[tuple[float, float]]]


def points(title: str, x_name: str, y_name: str, found: Points) -> Panel:
    """Draw small points for each pair and a large one at their mean, in one colour for each name. y is 0 to 1."""
    most = max((x for pairs in found.values() for x, _ in pairs), default=0.0) or 1.0
    left, bottom = MARGIN + AXIS, HEIGHT - AXIS
    across, up = (WIDTH - left - 20) / most, bottom - HEAD

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x * across, bottom - y * up

    lines = _heading(title, f"{y_name} over {x_name}")
    lines.append(f'<path class="axis" d="M{left} {HEAD}V{bottom}H{WIDTH - MARGIN}"/>')
    lines += [text(MARGIN, place(0, y)[1] + 4, f"{y:.0%}", "note") for y in (0.0, 0.5, 1.0)]
    lines += [text(place(most, 0)[0] - 8, bottom + 16, f"{most:.1f}", "note"), text(left, bottom + 16, "0", "note")]
    for color, pairs in zip(COLORS, found.values(), strict=False):
        middle = sum(x for x, _ in pairs) / len(pairs), sum(y for _, y in pairs) / len(pairs)
        for radius, pair in [*((2.0, pair) for pair in pairs), (4.5, middle)]:
            x, y = place(*pair)
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>')
    return HEIGHT, [*lines, *_legend(found)]


def _legend(names: Iterable[str]) -> Iterator[str]:
    """The legend stands in the corner of high cost and low benefit, where no policy should be."""
    left, top = WIDTH - 105, HEIGHT - AXIS - 15 * len(COLORS)
    for i, (color, name) in enumerate(zip(COLORS, names, strict=False)):
        yield f'<rect x="{left}" y="{top + 15 * i}" width="9" height="9" rx="2" fill="{color}"/>'
        yield text(left + 14, top + 15 * i + 9, name, "note")
