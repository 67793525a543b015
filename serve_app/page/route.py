"""Serves the page at `/`: joins its files to one HTML document, with headers that isolate it.
Never computes anything per request, and never refers to another host: the page works offline."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

VENDORED = "vendor/marked.umd.js"
"""The library that reads Markdown. vendor/THIRD_PARTY.txt has its origin, digest and licence."""

SCRIPTS = (
    "stream.js",
    "kept.js",
    "theme.js",
    "models.js",
    "key.js",
    "tint.js",
    "copy.js",
    "nodes.js",
    "markdown.js",
    "chart.js",
    "timing.js",
    "message.js",
    "chat.js",
    "examples.js",
    "live.js",
    "load.js",
    "main.js",
)
"""The scripts in the order in which they are joined to one module."""


@cache
def document() -> tuple[str, dict[str, str]]:
    """Build the HTML and its headers."""
    style, vendored = _read("page.css"), _read(VENDORED)
    script = "".join(_read(name) for name in SCRIPTS)
    html = _read("page.html")
    elements = {
        "<!-- style -->": f"<style>{style}</style>",
        "<!-- vendored -->": f"<script>{vendored}</script>",
        "<!-- script -->": f'<script type="module">{script}</script>',
    }
    for marker in elements:
        assert html.count(marker) == 1, marker
    for marker, element in elements.items():
        html = html.replace(marker, element)
    return html, _headers(html, style, vendored, script)


def page_route() -> Route:
    html, headers = document()

    async def get_page(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(html, headers=headers)

    return Route("/", get_page)


def _headers(html: str, style: str, vendored: str, script: str) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "script-src": f"{_sha256(vendored)} {_sha256(script)}",  # only the page's own, whatever a model writes
        "style-src": _sha256(style),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # with the next line: no text can become markup or code
        "trusted-types": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # an upgraded server has another page
        "ETag": f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"',
    }


def _sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
