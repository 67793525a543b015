"""Serves the routes that convert between text and token ids, and the one that describes the tokenizer.
Never asks an engine nor waits at the gate: the routes answer even while the engines are full or unreachable, but count
among their tenant's requests. Only a model that has not been awake yet is woken: nothing else knows what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.generation.submission import encode_conversation
from serve_app.api.http.asgi import read_json_body
from serve_app.api.http.json_text import json_response
from serve_app.api.http.offload import run_sized
from serve_app.api.models.lane import Lane
from serve_app.api.models.lanes import Lanes
from serve_app.api.requests.schema import ModelT, parse_request
from serve_app.api.requests.text_schema import DetokenizeRequest, TokenizeMessages, TokenizePrompt, TokenizeRequest
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import tenant_of
from serve_app.errors.api_error import ApiError

Json = dict[str, Any]


MODEL_PARAMETER: Mapping[str, Any] = {
    "name": "model",
    "in": "query",
    "description": "A served model, adapter or alias; unset, the first model.",
    "schema": {"type": "string"},
}


@dataclass(frozen=True, slots=True)
class TextRoutes:
    lanes: Lanes
    max_body_bytes: int

    async def tokenize(self, request: Request) -> Response:
        with self.lanes.arriving(tenant_of(request.scope)):
            asked = (await self._read(request, TokenizeRequest)).root
            lane = self.lanes.named(asked.model)
            await lane.known()
            tokens = await _encode(asked, lane)
            return await run_sized(len(tokens), lambda: json_response(_tokens_json(tokens, asked, lane)))

    async def detokenize(self, request: Request) -> Response:
        with self.lanes.arriving(tenant_of(request.scope)):
            asked = await self._read(request, DetokenizeRequest)
            tokenizer = self.lanes.named(asked.model).tokenizer
            return await run_sized(len(asked.tokens), lambda: json_response(_detokenize(asked.tokens, tokenizer)))

    async def tokenizer_info(self, request: Request) -> Response:
        lane = self.lanes.named(request.query_params.get("model"))
        tokenizer = lane.tokenizer
        entry, special = tokenizer.vocabulary_entry, tokenizer.special_texts
        info: Json = {"model": lane.model.id, "vocab_size": tokenizer.vocab_size}
        for name, token_id in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
            info |= {f"{name}_token_id": token_id, f"{name}_token": None if token_id is None else entry(token_id)}
        info["special_tokens"] = [{"id": token_id, "text": special[token_id]} for token_id in sorted(special)]
        return JSONResponse(info | {"has_chat_template": tokenizer.has_chat_template})

    async def _read(self, request: Request, kind: type[ModelT]) -> ModelT:
        body = await read_json_body(request.scope, request.receive, self.max_body_bytes)
        return await run_sized(len(body), lambda: parse_request(kind, body))

    def routes(self, guard: Sequence[Middleware], reading: Sequence[Middleware]) -> list[Route]:
        """`reading`: for routes that read a body; `guard`: for others."""
        handlers = {"/tokenize": self.tokenize, "/detokenize": self.detokenize}
        posts = [
            Route(prefix + path, handler, methods=["POST"], middleware=reading)
            for prefix in ("", "/v1")  # vLLM's place, and SGLang's
            for path, handler in handlers.items()
        ]
        return [*posts, Route("/tokenizer_info", self.tokenizer_info, middleware=guard)]


async def _encode(asked: TokenizePrompt | TokenizeMessages, lane: Lane) -> list[int]:
    if isinstance(asked, TokenizeMessages):
        chat, special = asked.as_chat(lane.model.id), bool(asked.add_special_tokens)
        prompt = await encode_conversation(chat, lane.tokenizer, lane.model, add_special_tokens=special)
        return prompt.token_ids
    text, special = asked.prompt, asked.add_special_tokens is not False
    return await run_sized(len(text), lambda: lane.tokenizer.encode(text, add_special_tokens=special))


def _tokens_json(tokens: list[int], asked: TokenizePrompt | TokenizeMessages, lane: Lane) -> Json:
    strs = [lane.tokenizer.vocabulary_entry(token) for token in tokens] if asked.return_token_strs else None
    counts: Json = {"count": len(tokens), "max_model_len": lane.model.max_model_len}
    return counts | {"tokens": tokens, "token_strs": strs}


def _detokenize(tokens: list[int], tokenizer: Tokenizer) -> Json:
    for place, token in enumerate(tokens):
        if tokenizer.vocabulary_entry(token) is None:  # decoding would leave it out silently
            param, last = f"tokens.{place}", tokenizer.vocab_size - 1
            but = ", but this one is unused" if token <= last else ""
            text = f"{param}: token id {token} is out of vocabulary: this model's ids are 0 to {last}{but}."
            raise ApiError(400, text, param=param, code="invalid_value")
    return {"prompt": tokenizer.decode(tokens)}
