"""Owns the promise that those web pages may use the API from a browser which the settings allow.
Never starts a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys, digest
from serve_app.settings.auth import ApiKey
from serve_app.settings.cors import CorsSettings
from tests.serve_app.harness import CHAT, MODEL, ScriptedClient, finished, scheduled, tokens

pytestmark = pytest.mark.anyio

CHATS = "/v1/chat/completions"
PAGE, LOCAL = "https://chat.example.com", "http://localhost:3000"
KEYS = Keys([ApiKey(sha256=digest(b"key"), tenant="a")])
ORIGIN, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"


@asynccontextmanager
async def browser(origin: str = PAGE, keys: Keys | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    client = ScriptedClient([scheduled()], tokens("hi"), [finished()])
    app = create_app(client, Tokenizer.byte_level(), MODEL, keys=keys, cors=CorsSettings(**settings))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers={"origin": origin}) as page:
        yield page


async def preflight(page: httpx.AsyncClient, path: str = CHATS, **more: str) -> httpx.Response:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return await page.options(path, headers=asked | more)


@pytest.mark.parametrize("path", [CHATS, "/v1/messages", "/v1/responses", "/v1/models", "/health"])
async def test_a_preflight_needs_no_key_and_allows_the_headers_that_it_asks_for(path: str) -> None:
    async with browser(keys=KEYS) as page:
        answer = await preflight(page, path)
    assert answer.status_code == 200
    assert answer.headers[ORIGIN] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_for_the_page_with_its_headers(stream: bool) -> None:
    async with browser(allow_origins=[PAGE]) as page:
        answer = await page.post(CHATS, json=CHAT | {"stream": stream, "verbosity": "low"})
    assert (answer.status_code, answer.headers[ORIGIN]) == (200, PAGE)
    assert answer.headers["x-chunkserve-ignored"] == "verbosity"
    shown = {"x-chunkserve-ignored", "x-request-id", "retry-after", "retry-after-ms", "x-should-retry"}
    assert shown <= set(answer.headers[EXPOSED].split(", "))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(CHATS, CHAT, 401), (CHATS, {}, 401), ("/v1/nothing", {}, 404), ("/v1/models", {}, 405)],
)
async def test_a_refusal_is_for_the_page_too(path: str, body: dict[str, Any], status: int) -> None:
    async with browser(keys=KEYS) as page:
        answer = await page.post(path, json=body)
    assert (answer.status_code, answer.headers[ORIGIN]) == (status, "*")


async def test_an_error_of_the_server_is_for_the_page_too() -> None:
    client = ScriptedClient(RuntimeError("broken"))
    app = create_app(client, Tokenizer.byte_level(), MODEL, cors=CorsSettings(allow_origins=("*",)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers={"origin": PAGE}) as page:
        answer = await page.post(CHATS, json=CHAT)
    assert (answer.status_code, answer.headers[ORIGIN]) == (500, "*")


@pytest.mark.parametrize(
    ("origin", "keys", "settings", "allowed"),
    [
        (PAGE, None, {}, None),
        (LOCAL, None, {}, LOCAL),
        ("http://127.0.0.1:8080", None, {}, "http://127.0.0.1:8080"),
        ("http://localhost.example.com", None, {}, None),
        ("http://localhost:3000.example.com", None, {}, None),
        ("null", None, {}, None),
        (PAGE, KEYS, {}, "*"),
        (PAGE, KEYS, {"allow_origins": []}, None),
        (LOCAL, None, {"allow_origins": []}, None),
        (LOCAL, None, {"allow_origins": [PAGE]}, None),
        (PAGE, None, {"allow_origins": ["*"]}, "*"),
        (PAGE, None, {"allow_origin_regex": r"https://[a-z]+\.example\.com"}, PAGE),
        (LOCAL, None, {"allow_origin_regex": r"https://[a-z]+\.example\.com"}, LOCAL),
        (PAGE + ".evil.net", None, {"allow_origin_regex": r"https://[a-z]+\.example\.com"}, None),
    ],
)
async def test_the_settings_say_which_pages_may(
    origin: str, keys: Keys | None, settings: dict[str, Any], allowed: str | None
) -> None:
    async with browser(origin, keys, **settings) as page:
        asked = await preflight(page)
        answer = await page.get("/v1/models")
    assert (asked.status_code == 200) is (allowed is not None)
    assert (asked.headers.get(ORIGIN), answer.headers.get(ORIGIN)) == (allowed, allowed)


async def test_a_page_that_is_allowed_may_reach_a_private_network() -> None:
    async with browser(LOCAL) as page:
        answer = await preflight(page, **{"access-control-request-private-network": "true"})
    assert answer.headers["access-control-allow-private-network"] == "true"


async def test_what_is_no_page_gets_no_such_header() -> None:
    app = create_app(ScriptedClient(), Tokenizer.byte_level(), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as program:
        answer = await program.get("/v1/models")
    assert ORIGIN not in answer.headers


async def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="is not a regular expression"):
        CorsSettings(allow_origin_regex="(")
