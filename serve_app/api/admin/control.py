"""Serves the admin routes: end a request, refuse new ones, empty the prefix caches.
Never decides who may use them: they need a key of their own, see serve_app.auth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.generation.live import LiveRequests
from serve_app.api.http.asgi import read_json_body
from serve_app.api.models.lanes import Lanes
from serve_app.api.requests.schema import parse_request
from serve_app.api.requests.strict_model import StrictModel
from serve_app.auth.keys import Keys, NeedsAdminKey
from serve_app.errors.api_error import ApiError

MAX_BODY_BYTES = 4096


class AbortRequest(StrictModel):
    request_id: str = Field(min_length=1, max_length=128)
    """The `id` of an answer, or the X-Request-Id of a request, which several requests may share."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The routes of one ingress replica. Operations on the whole deployment reach the others through the client."""

    lanes: Lanes
    live: LiveRequests

    async def abort(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, MAX_BODY_BYTES)
        name = parse_request(AbortRequest, body).request_id
        here = self.live.abort(name)
        if not await self.lanes.first.client.abort(name) and not here:
            text = "No request of that id is live: it has ended, or it was never here."
            raise ApiError(404, text, param="request_id", code="request_not_found")
        return JSONResponse({"request_id": name, "aborted": True})

    async def drain(self, _: Request) -> Response:
        for lane in self.lanes:
            lane.gate.close()
        return await self._tell(draining=True)

    async def resume(self, _: Request) -> Response:
        for lane in self.lanes:
            lane.gate.reopen()
        return await self._tell(draining=False)

    async def _tell(self, *, draining: bool) -> Response:
        await self.lanes.first.client.drain_all(draining)
        return JSONResponse({"draining": draining})

    async def reset_prefix_cache(self, _: Request) -> Response:
        found = await self.lanes.each(lambda lane: lane.client.reset_prefix_cache())
        dropped: list[dict[str, Any]] = [
            {"dropped_blocks": [], **one.body()} if isinstance(one, ApiError) else {"dropped_blocks": one}
            for one in found
        ]
        if not self.lanes.are_several:
            return JSONResponse(dropped[0])
        models = {lane.model.id: one for lane, one in zip(self.lanes, dropped, strict=True)}
        blocks = [number for one in dropped for number in one["dropped_blocks"]]
        return JSONResponse({"dropped_blocks": blocks, "models": models})

    def routes(self, keys: Keys) -> list[Route]:
        handlers = {
            "/admin/abort": self.abort,
            "/admin/drain": self.drain,
            "/admin/resume": self.resume,
            "/admin/reset_prefix_cache": self.reset_prefix_cache,
        }
        guard = [Middleware(NeedsAdminKey, keys=keys)]
        return [Route(path, handler, methods=["POST"], middleware=guard) for path, handler in handlers.items()]
