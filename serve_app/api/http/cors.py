"""Decides which web pages may use the API from a browser (CORS), with Starlette's middleware.
Never decides who may use the API: keys do."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from serve_app.settings.cors import CorsSettings

LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
"""Origins of pages that are served from the browser's own machine."""

_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
_EXPOSED = ("x-request-id", "request-id", "x-chunkserve-ignored", "openai-processing-ms", "retry-after")


def cors_middleware(settings: CorsSettings, *, needs_keys: bool) -> Middleware:
    """Make the middleware that answers preflights, and sets the CORS headers. `needs_keys`: the API needs a key, so all
    origins may be allowed."""
    origins, regex = settings.allow_origins, settings.allow_origin_regex
    if origins is None:
        origins = ("*",) if needs_keys else ()
        regex = LOOPBACK if regex is None else f"{LOOPBACK}|{regex}"
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_origin_regex=regex,
        allow_methods=_METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=_EXPOSED,
        max_age=settings.max_age,
    )
