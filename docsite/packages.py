"""Draws packages and what they import, read from the imports themselves: the engine's, the serving path's,
the API's, the kernels'.
Never says what may import what: the import contracts in pyproject.toml do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Tree:
    """A package whose parts are drawn, each of which is a room."""

    package: str
    title: str
    introduction: str
    picture: str
    """Its file in docs/."""
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rooms that are modules of the package itself, and which these are."""
    owns: Mapping[str, str] = field(default_factory=dict)
    """What each of these has."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """A package -> the room that it and all packages in it are."""
    base: frozenset[str] = frozenset()
    """The rooms below all others, to which no arrow is drawn."""
    left_out: frozenset[str] = frozenset()
    """Modules that are in no room."""

    @property
    def folder(self) -> Path:
        return ROOT.joinpath(*self.package.split("."))


ENGINE = Tree(
    package="engine",
    title="The engine's packages",
    introduction="""\
The contract is what all but `host` import, so no arrow to it is drawn.

![The engine's packages, from the front door to the contract that all of them share](../packages.svg)
""",
    picture="packages.svg",
    modules={
        "front door": ("async_engine", "adapter_cache", "compilation"),
        "contract": ("config", "features", "presets", "protocol", "step", "multimodal_inputs", "observer", "prefix"),
    },
    owns={
        "front door": "What callers use: an engine that streams tokens, its adapters, the wait for grammars.",
        "contract": "What all packages share: settings, requests and events, a step's plan, spans of other inputs.",
    },
    merged={"models": "models"},
    base=frozenset({"contract"}),
    left_out=frozenset({"engine.prepare"}),  # a name that is kept for a release
)
SERVING = Tree(
    package="serve_app",
    title="The serving path's packages",
    introduction="""\
`app` is what a config names, and `front` is the `serve` command. The API, which is the largest, has a picture of its
own below. Most import `errors` and `settings`, so no arrows to these are drawn.

![The serving path's packages, from the application to errors and settings](../packages-serving.svg)
""",
    picture="packages-serving.svg",
    modules={"app": ("app",)},
    owns={
        "app": "The application that `serve run config.yaml` builds: an ingress deployment over an engine deployment."
    },
    base=frozenset({"errors", "settings"}),
    merged={"api": "api"},
)
API = Tree(
    package="serve_app.api",
    title="The API's packages",
    introduction="""\
A request goes from the routes down to `requests`, and its answer comes back up: `generation` reads what the engine
says, and `openai` and `anthropic` write it.

![The API's packages, from the routes to the fields of requests](../packages-api.svg)
""",
    picture="packages-api.svg",
    modules={"routes": ("ingress", "measuring"), "request_facts": ("request_facts",)},
    owns={
        "routes": "The app with its routes, and the measuring of each request.",
        "request_facts": "What is known of one request besides its times, for whoever describes it at its end.",
    },
)
KERNELS = Tree(
    package="kernels",
    title="The kernels' packages",
    introduction="""\
A model's definition is written in the operations of `forward`, and `reference` says what each of them gives: all others
are compared with it. Nothing here imports anything of the engine.

![The kernels' packages, from the choice of kernels to a step's rows](../packages-kernels.svg)
""",
    picture="packages-kernels.svg",
    modules={"choice": ("choice",), "forward": ("forward",), "reference": ("reference",)},
    owns={
        "choice": "Which kernels a model runs on, with the reason; made once for each engine.",
        "forward": "The operations that a model's definition is written in.",
        "reference": "The definition of correct: every operation in plain torch.",
    },
    merged={"triton": "triton"},
)
TRITON = Tree(
    package="kernels.triton",
    title="The Triton kernels' packages",
    introduction="""\
One kind of operation knows nothing of another, but for what all of them share.

![The Triton kernels' packages, from the forward pass to what they share](../packages-triton.svg)
""",
    picture="packages-triton.svg",
    modules={"forward": ("forward",), "ops": ("ops",)},
    owns={
        "forward": "The forward pass on these kernels, where norms, rotation and the cache's write are one launch.",
        "ops": "The table of these kernels, for an eager forward pass.",
    },
)
TREES = (ENGINE, SERVING, API, KERNELS, TRITON)

WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, EDGE = 860, 84, 150, 34, 16
STYLE = """
text { font: 13px ui-monospace, monospace; fill: #1f2328; text-anchor: middle }
.box { fill: #f6f8fa; stroke: #d1d9e0 } .arrow { stroke: #59636e; stroke-width: 1.2 } .head { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .box { fill: #151b23; stroke: #3d444d } .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
}
"""

INTRODUCTION = """\
# The packages

Written by `make docs`, from the imports. An arrow leads from a package to one that it imports. An import is left out of
a picture where a way leads there through others; the tables have all. No arrow leads up: where a file lies decides what
it may import, and `make check` holds that by import contracts.
"""

Imports = Mapping[str, frozenset[str]]


def room_of(tree: Tree, module: str) -> str | None:
    """The room of a module such as `engine.core.core`. None: it is the tree's own `__init__`, or left out."""
    if module in tree.left_out or module == tree.package:
        return None
    parts = module.removeprefix(f"{tree.package}.").split(".")
    for room, modules in tree.modules.items():
        if parts[0] in modules:
            return room
    package = ".".join(parts if tree.folder.joinpath(*parts).is_dir() else parts[:-1])
    return next((room for above, room in tree.merged.items() if f"{package}.".startswith(f"{above}.")), package)


def imports(tree: Tree) -> dict[str, frozenset[str]]:
    """Each room with those that it imports, itself left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(tree.folder.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        own = room_of(tree, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        if own is not None:
            others = (room_of(tree, name) for name in imported(path, tree.package))
            found.setdefault(own, set()).update(other for other in others if other is not None)
    return {room: frozenset(others - {room}) for room, others in found.items()}


def imported(path: Path, package: str) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it, and also where only types are checked."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [_module(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.startswith(f"{package}."))


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


def picture(tree: Tree) -> str:
    """The drawing as SVG, which reads in light and dark."""
    graph = imports(tree)
    rows = levels(graph)
    places = {
        room: (WIDTH * (2 * number + 1) // (2 * len(row)), EDGE + level * ROW)
        for level, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    height = 2 * EDGE + (len(rows) - 1) * ROW + BOX_HEIGHT
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>"]
    lines += [f"<title>{escape(tree.title)}</title>", HEAD]
    for room, other in ((room, other) for room, other in drawn(graph) if other not in tree.base):
        (x, y), (to_x, to_y) = places[room], places[other]
        ends = f'x1="{x}" y1="{y + BOX_HEIGHT}" x2="{to_x}" y2="{to_y - 2}"'
        lines.append(f'<line class="arrow" {ends} marker-end="url(#head)"/>')
    wide = WIDTH // max(1, len(tree.base)) - 2 * EDGE
    narrow = min(BOX_WIDTH, WIDTH // max(map(len, rows)) - EDGE)
    for room, (x, y) in places.items():
        width = wide if room in tree.base else narrow
        box = f'x="{x - width // 2}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6"'
        lines.append(f'<rect class="box" {box}/>')
        lines.append(f'<text x="{x}" y="{y + 22}">{escape(room)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def page() -> str:
    """Each tree's picture, and a row for each of its rooms."""
    return "\n".join([INTRODUCTION, *(line for tree in TREES for line in _section(tree))]).rstrip() + "\n"


def _section(tree: Tree) -> list[str]:
    graph = imports(tree)
    lines = [f"## {tree.title}", "", tree.introduction, "| package | what it has | imports |", "|---|---|---|"]
    for room in (room for row in levels(graph) for room in row):
        path = f"`{tree.package.replace('.', '/')}/{room.replace('.', '/')}"
        name = f"{path}/`" if room not in tree.modules else f"{path}.py`" if room in tree.modules[room] else room
        others = ", ".join(sorted(graph[room])) or "none of these"
        lines.append(f"| {name} | {_owns(tree, room)} | {others} |")
    folder = tree.package.replace(".", "/")
    named = {
        room: [f"`{folder}/{name}.py`" for name in names] for room, names in tree.modules.items() if room not in names
    }
    told = [f"the {room} {'are' if room.endswith('s') else 'is'} {_listed(names)}" for room, names in named.items()]
    sentence = "; ".join(told)
    return [*lines, "", *([f"{sentence[:1].upper()}{sentence[1:]}.", ""] if told else [])]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _owns(tree: Tree, room: str) -> str:
    """The first sentence of the room's docstring."""
    if room in tree.owns:
        return tree.owns[room]
    path = tree.folder.joinpath(*room.split("."), "__init__.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
