"""Serves the routes about the server itself: its version, its OpenAPI document, and the page that shows the document.
Never computes anything per request: everything is made once, with the app."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from serve_app.api.openapi.docs_page import render
from serve_app.api.openapi.document import Access, openapi_document
from serve_app.auth.keys import Keys

_DISTRIBUTION = "chunkserve"
# The page needs no other resources, and must not load any, whatever the document contains.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def package_version() -> str:
    """Return the installed package's version; "0+unknown" for a source tree that was not installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


@cache  # it takes a tenth of a second, and tests make many apps in a process
def _document_and_page(number: str, access: Access) -> tuple[str, str]:
    document = openapi_document(number, access)
    return json.dumps(document), render(document)


def about_routes(keys: Keys) -> list[Route]:
    number = package_version()
    document, page = _document_and_page(number, Access(keys=keys.are_needed, admin=keys.admin_is_open))

    async def get_version(_: Request) -> Response:
        return JSONResponse({"version": number})

    async def get_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def get_page(_: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    handlers = {"/version": get_version, "/openapi.json": get_document, "/docs": get_page}
    return [Route(path, handler) for path, handler in handlers.items()]
