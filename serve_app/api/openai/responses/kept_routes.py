"""Owns the routes to a kept response: the response, its input items, and its deletion.
Never finds another key's response, which looks as unknown as any that does not exist. Asks no engine, but counts among
its tenant's requests: a conversation may have megabytes to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pydantic_core
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.http.json_text import json_response
from serve_app.api.http.offload import run_sized
from serve_app.api.models.lanes import Lanes
from serve_app.api.openai.responses.earlier import how_long
from serve_app.api.openai.responses.includes import Includable
from serve_app.api.openai.responses.listing import Page, listed
from serve_app.api.requests.hints import UNSUPPORTED, ignore_or_refuse
from serve_app.auth.keys import tenant_of
from serve_app.errors.api_error import ApiError, clip
from serve_app.store.entry import Entry, Wanted
from serve_app.store.memory import AnswerMemory


class _ResponseIdConvertor(StringConvertor):
    """Matches any name but those of OpenAI's other operations, which are not served: their clients expect a 404, and
    would get a 405 from the route to a response of that name."""

    regex = "(?!(?:compact|input_tokens)(?:/|$))[^/]+"


register_url_convertor("response_id", _ResponseIdConvertor())
PATH = "/responses/{response_id:response_id}"
_ID_CHARS = 80
_INCLUDE = ("include", "include[]")
_OF_STREAMS = ("stream", "starting_after", "include_obfuscation")


@dataclass(frozen=True, slots=True)
class KeptRoutes:
    """`memory`: None if nothing is kept. `max_bytes`: the largest conversation."""

    lanes: Lanes
    memory: AnswerMemory | None
    max_bytes: int

    async def get(self, request: Request) -> Response:
        _check_query(request, _OF_STREAMS)
        for name in _OF_STREAMS:
            if request.query_params.get(name, "false") != "false":
                raise ApiError(400, f"{name}: a kept response is not streamed.", param=name, code=UNSUPPORTED)
        with self.lanes.arriving(tenant_of(request.scope)):
            entry = await self._find(request)
            return await run_sized(_size(entry), lambda: json_response(_response(entry)))

    async def input_items(self, request: Request) -> Response:
        page = Page.from_query(request.query_params)
        _check_query(request, Page.NAMES)
        with self.lanes.arriving(tenant_of(request.scope)):
            return await self._items(request, page)

    async def _items(self, request: Request, page: Page) -> Response:
        entry = await self._find(request)
        before: tuple[bytes, ...] = ()
        if entry.previous is not None and self.memory is not None:
            wanted = Wanted(entry.previous, (), self.max_bytes)
            recalled = await self.memory.recall(tenant_of(request.scope).name, wanted)
            if recalled.missing is not None:
                raise self._not_found(recalled.missing, f", which {clip(entry.response_id, _ID_CHARS)!r} goes on from,")
            before = recalled.conversation
        texts = [*before, *entry.input]
        return await run_sized(sum(map(len, texts)), lambda: json_response(page.cut(listed(entry.response_id, texts))))

    async def delete(self, request: Request) -> Response:
        name, tenant = request.path_params["response_id"], tenant_of(request.scope)
        with self.lanes.arriving(tenant):
            if self.memory is None or not await self.memory.delete(tenant.name, name):
                raise self._not_found(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def get_or_delete(self, request: Request) -> Response:
        """Serve both methods on one route, so that a 405's `Allow` names both."""
        return await (self.delete(request) if request.method == "DELETE" else self.get(request))

    async def _find(self, request: Request) -> Entry:
        name = request.path_params["response_id"]
        entry = None if self.memory is None else await self.memory.get(tenant_of(request.scope).name, name)
        if entry is None:
            raise self._not_found(name)
        return entry

    def _not_found(self, name: str, what: str = "") -> ApiError:
        told = f"Response with id '{clip(name, _ID_CHARS)}'{what} not found. {how_long(self.memory)}"
        return ApiError(404, told, param="response_id", code="response_not_found")

    def routes(self, reading: Sequence[Middleware]) -> list[Route]:
        items = f"{PATH}/input_items"
        handlers = ((["GET", "DELETE"], PATH, self.get_or_delete), (["GET"], items, self.input_items))
        return [
            Route(prefix + path, handler, methods=methods, middleware=reading)
            for prefix in ("/v1", "")
            for methods, path, handler in handlers
        ]


def _check_query(request: Request, known: Sequence[str]) -> None:
    for name, value in request.query_params.multi_items():
        if name in _INCLUDE and value in get_args(Includable):
            ignore_or_refuse(f"include.{value}", "include: a kept response tells what it told at first", "include")
        elif name in _INCLUDE:
            text = f"include: should be one of {', '.join(get_args(Includable))}, but it is {clip(value, _ID_CHARS)!r}"
            raise ApiError(400, text, param="include", code="invalid_value")
        elif name not in known:
            text = f"{clip(name, _ID_CHARS)}: this parameter is not known to the server"
            raise ApiError(400, text, param=name, code="unknown_parameter")


def _size(entry: Entry) -> int:
    return sum(map(len, entry.texts))


def _response(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for text in entry.fields:
        told |= pydantic_core.from_json(text)
    return told | {"output": [pydantic_core.from_json(text) for text in entry.output.values()]}
