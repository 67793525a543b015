"""Serves the route that shows what the replicas are doing now, for the playground page and for other monitors.
Never wakes an engine, and never shows a text, tenant or key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.engines.engine_client import EngineClient
from serve_app.errors.api_error import ApiError, clip

PATH = "/activity"
_AFTER = "after"
_PATTERN = r"[A-Za-z0-9_-]{1,64}:[0-9]{1,18}"
_MOST_ENGINES = 1000

PARAMETER: Mapping[str, Any] = {
    "name": _AFTER,
    "in": "query",
    "description": "`<engine>:<id of a step>`, the last step seen of each engine: only later ones are returned.",
    "schema": {"type": "array", "items": {"type": "string", "pattern": f"^{_PATTERN}$"}, "maxItems": _MOST_ENGINES},
}


def activity_route(client: EngineClient, model_id: str) -> Route:
    async def get_activity(request: Request) -> Response:
        activity = await client.activity(_read_after(request))
        return JSONResponse({"model": model_id, **asdict(activity)}, headers={"Cache-Control": "no-store"})

    return Route(PATH, get_activity)


def _read_after(request: Request) -> dict[str, int]:
    """Raises ApiError: 400 for an unknown parameter or an invalid value."""
    for name in request.query_params:
        if name != _AFTER:
            text = f"{clip(name, 100)}: is no parameter of {PATH}; there is `{_AFTER}`."
            raise ApiError(400, text, param=name, code="unsupported_parameter")
    values = request.query_params.getlist(_AFTER)
    if len(values) > _MOST_ENGINES:
        text = f"{_AFTER}: at most {_MOST_ENGINES} values, and these are {len(values)}."
        raise ApiError(400, text, param=_AFTER, code="invalid_value")
    return dict(_read_one(value) for value in values)


def _read_one(value: str) -> tuple[str, int]:
    if not re.fullmatch(_PATTERN, value, re.ASCII):
        text = f"{_AFTER}: should be an engine and a step's id, `engine:12`, and not {clip(value, 100)!r}."
        raise ApiError(400, text, param=_AFTER, code="invalid_value")
    engine, _, step_id = value.partition(":")
    return engine, int(step_id)
