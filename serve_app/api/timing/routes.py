"""Serves the route that says why a request was slow.
Never knows a request that is still running, and never reveals one of another tenant."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.api.timing.recent import RecentTimes
from serve_app.auth.keys import tenant_of
from serve_app.engines.engine_client import EngineClient
from serve_app.errors.api_error import ApiError

PATH = "/requests/{request_id}/timing"


@dataclass(frozen=True, slots=True)
class TimingRoute:
    client: EngineClient
    recent: RecentTimes

    async def get_timing(self, request: Request) -> Response:
        name, tenant = request.path_params["request_id"], tenant_of(request.scope).name
        timing = await self.recent.find(name, tenant) or await self.client.timing(name, tenant)
        if timing is None:
            text = "No request of that id and key has ended lately: it still runs, is forgotten, or was never here."
            raise ApiError(404, text, param="request_id", code="request_not_found")
        return JSONResponse(asdict(timing), headers={"Cache-Control": "no-store"})
