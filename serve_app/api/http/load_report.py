"""Owns the header by which a response tells a load balancer how busy the server is: ORCA's, in the form asked for.
Never measures: the numbers are those that requests are routed by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

ASKED = "endpoint-load-metrics-format"
TOLD = "endpoint-load-metrics"

LoadReport = Callable[[], Mapping[str, float] | None]
"""Numbers by their names in vLLM; None where nothing is known."""


def load_header(scope: Scope, report: LoadReport) -> str | None:
    """The header's value; None for a request that has not asked for it, or in a form that this server does not have."""
    form = Headers(scope=scope).get(ASKED, "").strip().upper()
    if form not in ("TEXT", "JSON") or (numbers := report()) is None:
        return None
    if form == "JSON":
        return f"JSON {json.dumps({'named_metrics': numbers})}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items())
