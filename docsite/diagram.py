"""Draws a request's path: the replicas, what each part does, and its source file.
Never computes a layout: positions follow from the constants and the order of the tables below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, INDENT, LINE, PAD, GAP = 860, 16, 20, 20, 12, 34
NAME_WIDTH = 320

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .file { font: 12px ui-monospace, monospace; fill: #0969da }
.note { fill: #59636e; font-size: 12px }
.box { fill: #f6f8fa; stroke: #d1d9e0 } .arrow { stroke: #59636e; fill: none; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 } .file { fill: #4493f8 }
  .box { fill: #151b23; stroke: #3d444d } .arrow { stroke: #9198a1 }
}
"""


@dataclass(frozen=True, slots=True)
class Part:
    """`file` is relative to the repository's root; "" if the part is not ours."""

    about: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """`below` labels the arrow to the next box; `back` labels the arrow from it."""

    title: str
    parts: tuple[Part, ...]
    below: str = ""
    back: str = ""


BOXES = (
    Box("Client", (), "HTTP", "server-sent events"),
    Box("HAProxy, or Ray Serve's Python proxy", (), "straight to the ingress replica's HTTP server", ""),
    Box(
        "Ingress replica: HTTP and text",
        (
            Part("read, check, admit; the chat template, tokens", "serve_app/api/ingress.py"),
            Part("merge the answers of each prompt into one stream", "serve_app/api/openai/choices.py"),
            Part("turn events into text; find stop strings", "serve_app/api/generation/completion.py"),
            Part("continue at another engine after a failure", "serve_app/channel/migration.py"),
            Part("make one call for each attempt", "serve_app/channel/handle_client.py"),
            Part("choose an engine", "serve_app/routing/router.py"),
        ),
        "one unary Serve call a request, open until the answer is complete",
        "tokens: a frame a step, for all streams",
    ),
    Box(
        "Engine replica: token ids",
        (
            Part("take the call; send the tokens", "serve_app/replicas/deployment.py"),
            Part("run the step loop in a thread", "engine/async_engine.py"),
            Part("plan, execute and apply a step", "engine/core/core.py"),
            Part("decide what the step computes", "engine/scheduling/planner.py"),
            Part("decide where a prompt's chunk ends", "engine/scheduling/chunk_policy.py"),
            Part("apply results to requests", "engine/core/applier.py"),
        ),
        "a frozen plan of rows",
        "sampled ids",
    ),
    Box(
        "Execution",
        (
            Part("CPU: run a step as one recorded program", "engine/models/native.py"),
            Part("GPU: queue a step, read it later", "engine/execution/gpu/executor.py"),
            Part("GPU: replay a captured step", "engine/execution/gpu/model.py"),
        ),
    ),
)


def render() -> str:
    """Render the picture as SVG for light and dark pages."""
    lines, top = list[str](), LEFT
    for number, box in enumerate(BOXES):
        height = PAD * 2 + LINE * (1 + len(box.parts)) - 4
        lines += _box(box, top, height)
        top += height
        if number + 1 < len(BOXES):
            lines += _arrows(box, top)
            top += GAP
    height = top + LEFT
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>"]
    return "\n".join([*head, "<title>A request's path</title>", *lines, "</svg>"]) + "\n"


def _box(box: Box, top: int, height: int) -> Iterator[str]:
    yield f'<rect class="box" x="{LEFT}" y="{top}" width="{WIDTH - 2 * LEFT}" height="{height}" rx="6"/>'
    y = top + PAD + 12
    yield _text(LEFT + PAD, y, box.title, "title")
    for part in box.parts:
        y += LINE
        yield _text(LEFT + PAD + INDENT, y, part.about, "")
        yield _text(LEFT + PAD + INDENT + NAME_WIDTH, y, part.file, "file")


def _arrows(box: Box, top: int) -> Iterator[str]:
    down, up, middle = LEFT + 60, WIDTH // 2 + 130, top + GAP // 2 + 4
    yield f'<path class="arrow" d="M{down} {top}v{GAP - 2}m-4 -6l4 6l4 -6"/>'
    yield _text(down + 12, middle, box.below, "note")
    if box.back:
        yield f'<path class="arrow" d="M{up} {top + GAP}v-{GAP - 2}m-4 6l4 -6l4 6"/>'
        yield _text(up + 12, middle, box.back, "note")


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'
