"""Owns line charts as SVG, with axes, lines and marks, for light and dark pages.
Never computes a figure or loads anything: a page with these charts is one file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 44, 40  # around the plot, in pixels
COLOURS = 6
"""The number of lines that can be told apart."""

STYLE = """
svg { max-width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: #1f2328 }
svg .title { font-weight: 600 } svg .note { fill: #59636e; font-size: 11px }
svg .grid { stroke: #d1d9e0 } svg .mark { stroke: #9a6700; stroke-dasharray: 4 3 }
svg .line { fill: none; stroke-width: 1.6 }
svg .s0 { stroke: #0969da } svg .s1 { stroke: #cf222e } svg .s2 { stroke: #1a7f37 }
svg .s3 { stroke: #8250df } svg .s4 { stroke: #bc4c00 } svg .s5 { stroke: #57606a }
svg .dot { stroke-width: 4; stroke-linecap: round }
@media (prefers-color-scheme: dark) {
  svg text { fill: #e6edf3 } svg .note { fill: #9198a1 } svg .grid { stroke: #3d444d } svg .mark { stroke: #d29922 }
  svg .s0 { stroke: #4493f8 } svg .s1 { stroke: #f85149 } svg .s2 { stroke: #3fb950 }
  svg .s3 { stroke: #ab7df8 } svg .s4 { stroke: #db6d28 } svg .s5 { stroke: #9198a1 }
}
"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to pixels, and where its ticks are."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    transform: Callable[[float], float] = lambda value: value

    def pixel(self, value: float, begin: float, end: float) -> float:
        low, high, at = self.transform(self.low), self.transform(self.high), self.transform(value)
        return begin + (end - begin) * (at - low) / (high - low)


def linear(values: Iterable[float]) -> Axis:
    """An axis from 0 to the greatest value, or a little beyond it."""
    most = max(values, default=0.0) or 1.0
    step = _round_step(most / 4)
    count = math.ceil(most / step - 1e-9)
    return Axis(0.0, count * step, tuple((i * step, f"{i * step:g}") for i in range(count + 1)))


def logarithmic(values: Iterable[float]) -> Axis:
    """A logarithmic axis between powers of ten that enclose the positive values."""
    above = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(above)))
    high = max(math.ceil(math.log10(max(above))), low + 1)
    ticks = tuple((10.0**power, f"{10.0**power:g}") for power in range(low, high + 1))
    return Axis(10.0**low, 10.0**high, ticks, lambda value: math.log10(max(value, 10.0**low)))


def nines() -> Axis:
    """An axis for percentiles on which each further nine (90 %, 99 %, 99.9 %) has the same width."""
    ticks = tuple((share, f"{100 * share:g}") for share in (0.0, 0.5, 0.9, 0.99, 0.999))
    return Axis(0.0, 0.999, ticks, lambda share: -math.log10(1 - min(share, 0.999)))


def _round_step(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def chart(
    title: str,
    x_label: str,
    lines: dict[str, Points],
    x: Axis | None = None,
    y: Axis | None = None,
    marks: Sequence[tuple[float, str]] = (),
    dots: bool = False,
) -> str:
    """Draw lines by name. Axes that are not given are made to fit all points. `marks` are vertical lines with a label.

    Raises:
        ValueError: there are more lines than can be told apart.
    """
    if len(lines) > COLOURS:
        raise ValueError(f"{len(lines)} lines; {COLOURS} can be told apart")
    x = x or linear(at for points in lines.values() for at, _ in points)
    y = y or linear(value for points in lines.values() for _, value in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>{escape(title)}</title>',
        text(LEFT, 16, title, "title"),
        *_axes(x, y, x_label),
        *(_mark(x, at, words) for at, words in marks if x.low <= at <= x.high),
    ]
    for i, (name, points) in enumerate(lines.items()):
        parts += _line(x, y, points, i, dots)
        parts.append(_legend(i, name))
    return "\n".join([*parts, "</svg>"])


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """Draw words at a position in pixels. `kind` is their CSS class; `anchor` says which end of them is at the
    position."""
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _across(x: Axis, value: float) -> float:
    return x.pixel(value, LEFT, WIDTH - RIGHT)


def _down(y: Axis, value: float) -> float:
    return y.pixel(value, HEIGHT - BOTTOM, TOP)


def _axes(x: Axis, y: Axis, x_label: str) -> Iterator[str]:
    for value, words in y.ticks:
        at = _down(y, value)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield text(LEFT - 6, at + 4, words, "note", "end")
    for value, words in x.ticks:
        at = _across(x, value)
        yield f'<path class="grid" d="M{at:.1f} {HEIGHT - BOTTOM}v4"/>'
        yield text(at, HEIGHT - BOTTOM + 17, words, "note", "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "note", "middle")


def _line(x: Axis, y: Axis, points: Points, i: int, dots: bool) -> Iterator[str]:
    """Draw a line. A single point is always drawn as a dot."""
    places = [(_across(x, at), _down(y, value)) for at, value in points]
    if len(places) > 1:
        path = "L".join(f"{at:.1f} {down:.1f}" for at, down in places)
        yield f'<path class="line s{i}" d="M{path}"/>'
    if dots or len(places) == 1:
        yield from (f'<path class="dot s{i}" d="M{at:.1f} {down:.1f}h0"/>' for at, down in places)


def _mark(x: Axis, value: float, words: str) -> str:
    at = _across(x, value)
    line = f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"><title>{escape(words)}</title></path>'
    return line + text(at + 3, TOP + 10, words[:40], "note")


def _legend(i: int, name: str) -> str:
    left = LEFT + i * 82
    return f'<path class="line s{i}" d="M{left} 32h14"/>' + text(left + 18, 36, name, "note")
