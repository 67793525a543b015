"""Draws the packages of the engine, the serving path, the API and the kernels, with the imports that the source has.
Never decides what may import what: the import contracts in pyproject.toml do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Tree:
    """A package to be drawn. Its modules are drawn in groups, by default one for each subpackage."""

    package: str
    title: str
    introduction: str
    picture: str
    """The file of the picture in docs/."""
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of modules of the package itself."""
    owns: Mapping[str, str] = field(default_factory=dict)
    """The description of each of these groups."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """A package -> the group of it and all packages in it."""
    base: frozenset[str] = frozenset()
    """The groups below all others, to which no arrow is drawn."""
    left_out: frozenset[str] = frozenset()
    """Modules that belong to no group."""

    @property
    def folder(self) -> Path:
        return ROOT.joinpath(*self.package.split("."))


ENGINE = Tree(
    package="engine",
    title="The engine's packages",
    introduction="""\
All packages but `host` import the contract, so no arrow to it is drawn.

![The engine's packages, from the front door to the contract that all of them share](../packages.svg)
""",
    picture="packages.svg",
    modules={
        "front door": ("async_engine", "adapter_cache", "compilation"),
        "contract": (
            *("config", "features", "presets", "protocol", "step", "kv_tiers", "multimodal_inputs", "observer"),
            *("prefix", "prefix_index"),
        ),
    },
    owns={
        "front door": "What callers use: an engine that streams tokens, its adapters, the wait for grammars.",
        "contract": "What all packages share: settings, requests and events, a step's plan, spans of other inputs.",
    },
    merged={"models": "models"},
    base=frozenset({"contract"}),
    left_out=frozenset({"engine.prepare"}),  # an old name that is kept for one release
)
SERVING = Tree(
    package="serve_app",
    title="The serving path's packages",
    introduction="""\
A config names `app`, and `front` is the commands `serve` and `chunkserve`. The API is the largest package and has its
own picture below. Most packages import `errors` and `settings`, so no arrows to these are drawn.

![The serving path's packages, from the application to errors and settings](../packages-serving.svg)
""",
    picture="packages-serving.svg",
    modules={"app": ("app",)},
    owns={
        "app": "The application that `serve run config.yaml` builds: an ingress deployment over an engine deployment."
    },
    base=frozenset({"errors", "settings"}),
    merged={"api": "api", "front": "front"},
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
    modules={
        "choice": ("choice",),
        "forward": ("forward",),
        "reference": ("reference",),
        "kv_format": ("kv_format",),
    },
    owns={
        "choice": "Which kernels a model runs on, with the reason; made once for each engine.",
        "forward": "The operations that a model's definition is written in.",
        "reference": "The definition of correct: every operation in plain torch.",
        "kv_format": "How K and V of 8 bits are kept: types, and the size of scales.",
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

Written by `make docs`, from the imports. An arrow leads from a package to one that it imports. A picture leaves out an
import if other arrows lead to the same package; the tables have all imports. No arrow leads up: a file's package
decides what it may import, and `make check` enforces this with import contracts.
"""

Imports = Mapping[str, frozenset[str]]


def group_of(tree: Tree, module: str) -> str | None:
    """Return the group of a module such as `engine.core.core`; None for the tree's own `__init__` and left-out
    modules."""
    if module in tree.left_out or module == tree.package:
        return None
    parts = module.removeprefix(f"{tree.package}.").split(".")
    for group, modules in tree.modules.items():
        if parts[0] in modules:
            return group
    package = ".".join(parts if tree.folder.joinpath(*parts).is_dir() else parts[:-1])
    return next((group for above, group in tree.merged.items() if f"{package}.".startswith(f"{above}.")), package)


def imports(tree: Tree) -> dict[str, frozenset[str]]:
    """Return each group with the other groups that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(tree.folder.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        own = group_of(tree, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        if own is not None:
            others = (group_of(tree, name) for name in imported(path, tree.package))
            found.setdefault(own, set()).update(other for other in others if other is not None)
    return {group: frozenset(others - {group}) for group, others in found.items()}


@cache
def imported(path: Path, package: str) -> tuple[str, ...]:
    """Return the modules of the package that a file imports, including imports in functions and for type checking."""
    return tuple(_imported(ast.parse(path.read_text(encoding="utf-8")), package))


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [_module(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.startswith(f"{package}."))


def _module(package: str, name: str) -> str:
    """Return the module that `from package import name` reads: a module in the package, or the package itself."""
    path = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else package


def levels(graph: Imports) -> list[list[str]]:
    """Sort packages into levels by their longest distance from a package that nobody imports, the top level first.
    Within a level they follow the order of the packages above them, so that few arrows cross.

    Raises:
        ValueError: packages import each other in a circle.
    """
    importers = {group: frozenset(other for other in graph if group in graph[other]) for group in graph}
    depth: dict[str, int] = {}
    while len(depth) < len(graph):
        ready = [group for group in graph if group not in depth and importers[group] <= depth.keys()]
        if not ready:
            raise ValueError(f"packages import each other in a circle: {_circle(graph)}")
        depth |= {group: max((depth[other] + 1 for other in importers[group]), default=0) for group in ready}
    found: list[list[str]] = []
    for level in sorted({*depth.values()}):
        above = {group: number / len(row) for row in found for number, group in enumerate(row)}
        row = sorted(group for group in depth if depth[group] == level)
        found.append(
            sorted(row, key=lambda group: max(((depth[o], above[o]) for o in importers[group]), default=(0, 0))[1])
        )
    return found


def _circle(graph: Imports) -> list[str]:
    return sorted(group for group in graph if group in _reached(graph, group))


def drawn(graph: Imports) -> list[tuple[str, str]]:
    """Return the arrows to draw: those imports that do not also follow from a path through other packages."""
    below = {group: _reached(graph, group) for group in graph}
    return sorted(
        (group, other)
        for group, others in graph.items()
        for other in others
        if not any(other in below[between] for between in others - {other})
    )


def _reached(graph: Imports, group: str) -> frozenset[str]:
    found: set[str] = set()
    pending = [*graph[group]]
    while pending:
        if (other := pending.pop()) not in found:
            found.add(other)
            pending += graph[other]
    return frozenset(found)


def picture(tree: Tree) -> str:
    """Render the picture as SVG for light and dark pages."""
    graph = imports(tree)
    rows = levels(graph)
    places = {
        group: (WIDTH * (2 * number + 1) // (2 * len(row)), EDGE + level * ROW)
        for level, row in enumerate(rows)
        for number, group in enumerate(row)
    }
    height = 2 * EDGE + (len(rows) - 1) * ROW + BOX_HEIGHT
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>"]
    lines += [f"<title>{escape(tree.title)}</title>", HEAD]
    for group, other in ((group, other) for group, other in drawn(graph) if other not in tree.base):
        (x, y), (to_x, to_y) = places[group], places[other]
        ends = f'x1="{x}" y1="{y + BOX_HEIGHT}" x2="{to_x}" y2="{to_y - 2}"'
        lines.append(f'<line class="arrow" {ends} marker-end="url(#head)"/>')
    wide = WIDTH // max(1, len(tree.base)) - 2 * EDGE
    narrow = min(BOX_WIDTH, WIDTH // max(map(len, rows)) - EDGE)
    for group, (x, y) in places.items():
        width = wide if group in tree.base else narrow
        box = f'x="{x - width // 2}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6"'
        lines.append(f'<rect class="box" {box}/>')
        lines.append(f'<text x="{x}" y="{y + 22}">{escape(group)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def page() -> str:
    """Render the page: each tree's picture, and a table with a row for each group."""
    return "\n".join([INTRODUCTION, *(line for tree in TREES for line in _section(tree))]).rstrip() + "\n"


def _section(tree: Tree) -> list[str]:
    graph = imports(tree)
    lines = [f"## {tree.title}", "", tree.introduction, "| package | what it has | imports |", "|---|---|---|"]
    for group in (group for row in levels(graph) for group in row):
        path = f"`{tree.package.replace('.', '/')}/{group.replace('.', '/')}"
        name = f"{path}/`" if group not in tree.modules else f"{path}.py`" if group in tree.modules[group] else group
        others = ", ".join(sorted(graph[group])) or "none of these"
        lines.append(f"| {name} | {_owns(tree, group)} | {others} |")
    folder = tree.package.replace(".", "/")
    named = {
        group: [f"`{folder}/{name}.py`" for name in names]
        for group, names in tree.modules.items()
        if group not in names
    }
    clauses = [
        f"the {group} {'are' if group.endswith('s') else 'is'} {_listed(names)}" for group, names in named.items()
    ]
    sentence = "; ".join(clauses)
    return [*lines, "", *([f"{sentence[:1].upper()}{sentence[1:]}.", ""] if clauses else [])]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _owns(tree: Tree, group: str) -> str:
    """Return the first sentence of the group's docstring."""
    if group in tree.owns:
        return tree.owns[group]
    path = tree.folder.joinpath(*group.split("."), "__init__.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
