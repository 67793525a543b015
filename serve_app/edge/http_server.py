"""Owns what Ray Serve calls before it serves HTTP in a process: a proxy's, or an ingress replica's own server.
Never starts a server."""

from __future__ import annotations

import os

from starlette.middleware import Middleware
from uvicorn.protocols.http import auto

from serve_app.edge.cors import policies_in
from serve_app.edge.guard import Guard
from serve_app.edge.http_protocol import BoundedHttpProtocol


def guard_ours() -> list[Middleware]:
    """Guard a cluster that serves only our applications. `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this
    function."""
    return _guarded(speaks_for_ray=True)


def guard_shared() -> list[Middleware]:
    """Guard our applications in a cluster with others', whose answers are left as they are."""
    return _guarded(speaks_for_ray=False)


def _guarded(*, speaks_for_ray: bool) -> list[Middleware]:
    policies = policies_in(os.environ)
    BoundedHttpProtocol.cors = policies
    auto.AutoHTTPProtocol = BoundedHttpProtocol  # uvicorn's default if no protocol is named, and Ray names none
    return [Middleware(Guard, speaks_for_ray=speaks_for_ray, cors=policies)]
