"""Owns the contract of sessions: how a client names one, and that the name reaches the router.
Never looks at where a request goes; that is the router's matter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve_app.harness import CHAT, PROMPT, Answer, Exchange, ScriptedClient, app_for, finished, scheduled

pytestmark = pytest.mark.anyio
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]


async def ask(client: ScriptedClient, path: str, body: dict[str, Any], header: str | None) -> Answer:
    headers = [("content-type", "application/json")] + ([("X-Session-ID", header)] if header is not None else [])
    return await Exchange(app_for(client), "POST", path, json.dumps(body).encode(), headers).finish()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("header", "key", "session"),
    [
        (None, None, None),
        (None, "", None),
        (None, "any text, é", "any text, é"),
        ("abc-1.2:/+=@~_", None, "abc-1.2:/+=@~_"),
        ("header", "body", "header"),
        ("x" * 128, None, "x" * 128),
    ],
)
async def test_the_session_goes_with_the_request(
    path: str, body: dict[str, Any], header: str | None, key: str | None, session: str | None
) -> None:
    client = ScriptedClient([scheduled()], [finished()])
    assert (await ask(client, path, body | {"prompt_cache_key": key}, header)).status == 200
    assert client.sessions == [session]


@pytest.mark.parametrize("header", ["", "a b", "x" * 129, "a;b", "\xe9", "a\tb"])
async def test_a_session_header_that_is_not_safe_is_refused_by_name(header: str) -> None:
    client = ScriptedClient()
    answer = await ask(client, "/v1/completions", PROMPT, header)
    assert (answer.status, answer.error["param"]) == (400, "X-Session-ID")
    assert len(answer.error["message"]) < 200
    assert client.submissions == []


@pytest.mark.parametrize("key", ["x" * 129, 5, True])
async def test_a_cache_key_that_is_too_long_or_no_text_is_refused_by_name(key: object) -> None:
    answer = await ask(ScriptedClient(), "/v1/completions", PROMPT | {"prompt_cache_key": key}, None)
    assert (answer.status, answer.error["param"]) == (400, "prompt_cache_key")
