"""Draws the engine's packages and what they import, read from the imports themselves.
Never says what may import what: the import contracts in pyproject.toml do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "engine"
FRONT_DOOR = ("async_engine", "adapter_cache", "compilation")
CONTRACT = ("config", "features", "protocol", "step", "multimodal_inputs", "observer", "prefix")
OWNS = {
    "front door": "What callers use: an engine that streams tokens, its adapters, the wait for grammars.",
    "contract": "What all packages share: settings, requests and events, the plan of a step, spans of other inputs.",
}
"""The two rooms that are modules of engine/ itself."""

WITHIN = {"models.families": "models"}
"""Packages whose modules are only read through the one that they lie in."""

WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, EDGE = 860, 84, 150, 34, 16
STYLE = """
text { font: 13px ui-monospace, monospace; fill: #1f2328; text-anchor: middle }
.box { fill: #f6f8fa; stroke: #d1d9e0 } .arrow { stroke: #59636e; stroke-width: 1.2 } .head { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .box { fill: #151b23; stroke: #3d444d } .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
}
"""

INTRODUCTION = """\
# The engine's packages

Written by `make docs`, from the imports. An arrow leads from a package to one that it imports. An import is left out of
the picture where a way leads there through others, and where it is the contract, which all but `host` import; the
table has all. No arrow leads up: where a file lies decides what it may import, and `make check` holds that by import
contracts.

![The engine's packages, from the front door to the contract that all of them share](../packages.svg)
"""

Imports = Mapping[str, frozenset[str]]


def room_of(module: str) -> str:
    """The package of a module such as `engine.core.core`; modules of engine/ itself are in one of two rooms."""
    parts = module.split(".")[1:]
    if not parts:
        return "contract"
    if parts[0] in FRONT_DOOR:
        return "front door"
    if parts[0] in CONTRACT:
        return "contract"
    package = ".".join(parts if ENGINE.joinpath(*parts).is_dir() else parts[:-1])
    return WITHIN.get(package, package)


def imports() -> dict[str, frozenset[str]]:
    """Each package with those that it imports, itself left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(ENGINE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("engine", "prepare"):  # a name that is kept for a release
            continue
        own = room_of(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        found.setdefault(own, set()).update(room_of(name) for name in _imported(path))
    return {room: frozenset(others - {room}) for room, others in found.items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "engine":
            yield from (_module(node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "engine")


def _module(package: str, name: str) -> str:
    """What `from package import name` reads: a module of a package, or a name in a module."""
    path = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else package


def levels(graph: Imports) -> list[list[str]]:
    """Packages by how far they lie below one that nobody imports, the highest first. In a level they have the order of
    those above them, so that few arrows cross.

    Raises:
        ValueError: packages import each other in a circle.
    """
    importers = {room: frozenset(other for other in graph if room in graph[other]) for room in graph}
    depth: dict[str, int] = {}
    while len(depth) < len(graph):
        ready = [room for room in graph if room not in depth and importers[room] <= depth.keys()]
        if not ready:
            raise ValueError(f"packages import each other in a circle: {_circle(graph)}")
        depth |= {room: max((depth[other] + 1 for other in importers[room]), default=0) for room in ready}
    found: list[list[str]] = []
    for level in sorted({*depth.values()}):
        above = {room: number / len(row) for row in found for number, room in enumerate(row)}
        row = sorted(room for room in depth if depth[room] == level)
        found.append(
            sorted(row, key=lambda room: max(((depth[o], above[o]) for o in importers[room]), default=(0, 0))[1])
        )
    return found


def _circle(graph: Imports) -> list[str]:
    return sorted(room for room in graph if room in _reached(graph, room))


def drawn(graph: Imports) -> list[tuple[str, str]]:
    """The arrows without which a package could not be reached from one above it."""
    below = {room: _reached(graph, room) for room in graph}
    return sorted(
        (room, other)
        for room, others in graph.items()
        for other in others
        if not any(other in below[between] for between in others - {other})
    )


def _reached(graph: Imports, room: str) -> frozenset[str]:
    found: set[str] = set()
    open_ones = [*graph[room]]
    while open_ones:
        if (other := open_ones.pop()) not in found:
            found.add(other)
            open_ones += graph[other]
    return frozenset(found)


def picture() -> str:
    """The drawing as SVG, which reads in light and dark."""
    graph = imports()
    rows = levels(graph)
    places = {
        room: (WIDTH * (2 * number + 1) // (2 * len(row)), EDGE + level * ROW)
        for level, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    height = 2 * EDGE + (len(rows) - 1) * ROW + BOX_HEIGHT
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>"]
    lines += ["<title>The engine's packages</title>", HEAD]
    for room, other in ((room, other) for room, other in drawn(graph) if other != "contract"):
        (x, y), (to_x, to_y) = places[room], places[other]
        ends = f'x1="{x}" y1="{y + BOX_HEIGHT}" x2="{to_x}" y2="{to_y - 2}"'
        lines.append(f'<line class="arrow" {ends} marker-end="url(#head)"/>')
    for room, (x, y) in places.items():
        width = WIDTH - 2 * EDGE if room == "contract" else BOX_WIDTH
        box = f'x="{x - width // 2}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6"'
        lines.append(f'<rect class="box" {box}/>')
        lines.append(f'<text x="{x}" y="{y + 22}">{escape(room)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def page() -> str:
    """The picture, and a row for each package."""
    graph = imports()
    lines = [INTRODUCTION, "| package | what it has | imports |", "|---|---|---|"]
    for room in (room for row in levels(graph) for room in row):
        name = room if room in OWNS else f"`engine/{room.replace('.', '/')}/`"
        others = ", ".join(sorted(graph[room])) or "nothing of the engine"
        lines.append(f"| {name} | {_owns(room)} | {others} |")
    modules = {"front door": FRONT_DOOR, "contract": CONTRACT}
    told = (f"the {room} is {_listed([f'`engine/{name}.py`' for name in names])}" for room, names in modules.items())
    return "\n".join([*lines, "", f"{'; '.join(told).capitalize()}."]) + "\n"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _owns(room: str) -> str:
    """The first sentence of the package's docstring."""
    if room in OWNS:
        return OWNS[room]
    path = ENGINE.joinpath(*room.split("."), "__init__.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
