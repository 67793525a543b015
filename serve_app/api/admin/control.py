"""Serves the admin routes: end a request, refuse new ones, empty the prefix caches.
Never decides who may use them: they need a key of their own, see serve_app.auth."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.admission.gate import Gate
from serve_app.api.generation.live import LiveRequests
from serve_app.api.http.asgi import read_json_body
from serve_app.api.requests.schema import parse_request
from serve_app.api.requests.strict_model import StrictModel
from serve_app.auth.keys import Keys, NeedsAdminKey
from serve_app.engines.engine_client import EngineClient
from serve_app.errors.api_error import ApiError

MAX_BODY_BYTES = 4096


class AbortRequest(StrictModel):
    request_id: str = Field(min_length=1, max_length=128)
    """The `id` of an answer, or the X-Request-Id of a request, which several requests may share."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The routes of one ingress replica. Operations on the whole deployment reach the others through the client."""

    client: EngineClient
    gate: Gate
    live: LiveRequests

    async def abort(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, MAX_BODY_BYTES)
        name = parse_request(AbortRequest, body).request_id
        here = self.live.abort(name)
        if not await self.client.abort(name) and not here:
            text = "No request of that id is live: it has ended, or it was never here."
            raise ApiError(404, text, param="request_id", code="request_not_found")
        return JSONResponse({"request_id": name, "aborted": True})

    async def drain(self, _: Request) -> Response:
        self.gate.close()
        return await self._tell()

    async def resume(self, _: Request) -> Response:
        self.gate.reopen()
        return await self._tell()

    async def _tell(self) -> Response:
        await self.client.drain_all(self.gate.is_draining)
        return JSONResponse({"draining": self.gate.is_draining})

    async def reset_prefix_cache(self, _: Request) -> Response:
        return JSONResponse({"dropped_blocks": await self.client.reset_prefix_cache()})

    def routes(self, keys: Keys) -> list[Route]:
        handlers = {
            "/admin/abort": self.abort,
            "/admin/drain": self.drain,
            "/admin/resume": self.resume,
            "/admin/reset_prefix_cache": self.reset_prefix_cache,
        }
        guard = [Middleware(NeedsAdminKey, keys=keys)]
        return [Route(path, handler, methods=["POST"], middleware=guard) for path, handler in handlers.items()]
