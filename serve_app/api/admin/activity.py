"""Serves the route that shows what the replicas are doing now, for the playground page and for other monitors.
Never wakes an engine, and never shows a text, tenant or key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.models.lanes import Lanes
from serve_app.errors.api_error import ApiError, clip
from serve_app.metrics.activity import FleetActivity, IngressActivity

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


def activity_route(lanes: Lanes) -> Route:
    async def get_activity(request: Request) -> Response:
        after = _read_after(request)
        found = await asyncio.gather(*(lane.client.activity(after) for lane in lanes))
        told: dict[str, Any] = {"model": lanes.first.model.id, **asdict(_together(found))}
        if lanes.are_several:
            engines = zip(lanes, found, strict=True)
            told["models"] = [
                {"model": lane.model.id, "engines": [engine.engine for engine in activity.engines]}
                for lane, activity in engines
            ]
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    return Route(PATH, get_activity)


def _together(found: Sequence[FleetActivity]) -> FleetActivity:
    """Add up what the models' replicas do. Each ingress replica serves all models."""
    ingresses: dict[str, IngressActivity] = {}
    for one in (one for activity in found for one in activity.ingresses):
        known = ingresses.get(one.ingress, IngressActivity(one.ingress, 0, 0))
        total = IngressActivity(one.ingress, known.num_live + one.num_live, known.num_waiting + one.num_waiting)
        ingresses[one.ingress] = total
    engines = [engine for activity in found for engine in activity.engines]
    return FleetActivity(engines, list(ingresses.values()), sum(activity.num_missing for activity in found))


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
