"""Serves the route that counts the tokens of a conversation's prompt.
Never asks an engine, and never waits at the gate."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.adapters.names import AdapterNames
from serve_app.api.anthropic.conversation import as_chat, names_of
from serve_app.api.anthropic.schema import CountTokensRequest
from serve_app.api.generation.sealing import Seal, of_tenant
from serve_app.api.generation.submission import encode_conversation
from serve_app.api.http.asgi import read_json_body
from serve_app.api.http.offload import run_sized
from serve_app.api.openai.forms import renamed
from serve_app.api.requests.schema import ChatRequest, parse_request
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import tenant_of
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError


@dataclass(frozen=True, slots=True)
class CountTokens:
    tokenizer: Tokenizer
    model: ServedModel
    max_body_bytes: int
    adapters: AdapterNames
    seal: Seal | None
    drop_billing_header: bool

    async def answer(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, self.max_body_bytes)
        tenant = tenant_of(request.scope).name
        given, chat = await run_sized(len(body), lambda: self._read(body, tenant))
        self.adapters.served(chat.model)
        try:
            prompt = await encode_conversation(chat, self.tokenizer, self.model)
        except ApiError as error:
            raise renamed(error, names_of(given, chat)) from error
        return JSONResponse({"input_tokens": len(prompt.token_ids)})

    def _read(self, body: bytes, tenant: str) -> tuple[CountTokensRequest, ChatRequest]:
        given, seal = parse_request(CountTokensRequest, body), of_tenant(self.seal, tenant)
        return given, as_chat(given, self.tokenizer, self.model, seal, drop_billing_header=self.drop_billing_header)
