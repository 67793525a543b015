"""Serves the route that counts the tokens of a conversation's prompt.
Never asks an engine, and never waits at the gate; it counts among its tenant's requests."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.api.anthropic.conversation import as_chat, names_of
from serve_app.api.anthropic.schema import CountTokensRequest
from serve_app.api.generation.sealing import Seal, of_tenant
from serve_app.api.generation.submission import encode_conversation
from serve_app.api.http.asgi import read_json_body
from serve_app.api.http.offload import run_sized
from serve_app.api.models.lane import Lane
from serve_app.api.models.lanes import Lanes
from serve_app.api.openai.forms import renamed
from serve_app.api.requests.schema import ChatRequest, parse_request
from serve_app.auth.keys import tenant_of
from serve_app.errors.api_error import ApiError


@dataclass(frozen=True, slots=True)
class CountTokens:
    lanes: Lanes
    max_body_bytes: int
    seal: Seal | None
    drop_billing_header: bool

    async def answer(self, request: Request) -> Response:
        with self.lanes.arriving(tenant_of(request.scope)):
            return await self._answer(request)

    async def _answer(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, self.max_body_bytes)
        tenant = tenant_of(request.scope).name
        asked = await self.lanes.of_body(body)
        lane = asked.lane
        if asked.is_served:
            await lane.known()
        given, chat = await run_sized(len(body), lambda: self._read(body, tenant, lane))
        self.lanes.served_by(lane, chat.model)
        try:
            prompt = await encode_conversation(chat, lane.tokenizer, lane.model)
        except ApiError as error:
            raise renamed(error, names_of(given, chat)) from error
        return JSONResponse({"input_tokens": len(prompt.token_ids)})

    def _read(self, body: bytes, tenant: str, lane: Lane) -> tuple[CountTokensRequest, ChatRequest]:
        given, seal = parse_request(CountTokensRequest, body), of_tenant(self.seal, tenant)
        return given, as_chat(given, lane.tokenizer, lane.model, seal, drop_billing_header=self.drop_billing_header)
