"""Decides which web pages may use the API from a browser (CORS), with Starlette's middleware.
Never decides who may use the API: keys do."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from serve_app.edge.cors import EXPOSED, METHODS
from serve_app.settings.cors import CorsSettings, allowed_origins


def cors_middleware(settings: CorsSettings, *, needs_keys: bool) -> Middleware:
    """Make the middleware that answers preflights and sets the CORS headers."""
    origins, regex = allowed_origins(settings, needs_keys=needs_keys)
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_origin_regex=regex,
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED,
        max_age=settings.max_age,
    )
