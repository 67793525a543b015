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

SCRIPTS = ("stream.js", "chat.js", "chart.js", "live.js", "load.js", "timing.js", "main.js")
"""The scripts in the order in which they are joined to one module."""

_STYLE, _SCRIPT = "<!-- style -->", "<!-- script -->"


@cache
def document() -> tuple[str, dict[str, str]]:
    """Build the HTML and its headers."""
    style = _read("page.css")
    script = "".join(_read(name) for name in SCRIPTS)
    html = _read("page.html")
    for marker, element in ((_STYLE, f"<style>{style}</style>"), (_SCRIPT, f'<script type="module">{script}</script>')):
        assert html.count(marker) == 1, marker
        html = html.replace(marker, element)
    return html, _headers(style, script)


def page_route() -> Route:
    html, headers = document()

    async def get_page(_: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    return Route("/", get_page)


def _headers(style: str, script: str) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "script-src": _sha256(script),  # only the page's own script runs, whatever a model writes
        "style-src": _sha256(style),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # an upgraded server has another page
    }


def _sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
