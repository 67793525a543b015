"""Writes the ORCA header that tells a load balancer how busy the server is, in the form that the request asked for.
Never measures: it reports the numbers that requests are routed by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

ASKED = "endpoint-load-metrics-format"
TOLD = "endpoint-load-metrics"

LoadReport = Callable[[], Mapping[str, float] | None]
"""Returns the numbers by their names in vLLM; None if nothing is known."""


def load_header(scope: Scope, report: LoadReport) -> str | None:
    """Return the header's value; None if the request did not ask for it, or asked for a form that is not supported."""
    form = Headers(scope=scope).get(ASKED, "").strip().upper()
    if form not in ("TEXT", "JSON") or (numbers := report()) is None:
        return None
    if form == "JSON":
        return f"JSON {json.dumps({'named_metrics': numbers})}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items())
