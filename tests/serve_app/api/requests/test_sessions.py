"""Owns the contract of sessions: how a client names one, and that the name reaches the router and the engine.
Never looks at where a request goes, nor at what is kept for a session: these are the router's and the engine's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve_app.auth.test_auth import ANNS, BOBS, KEYS
from tests.serve_app.harness import CHAT, PROMPT, Answer, Exchange, ScriptedClient, app_for, finished, scheduled

pytestmark = pytest.mark.anyio
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]


RESPONSES = ("/v1/responses", {"model": CHAT["model"], "input": "hi"})
MESSAGES = ("/v1/messages", CHAT | {"max_tokens": 5})


async def ask(
    client: ScriptedClient, path: str, body: dict[str, Any], header: str | None, key: str | None = None
) -> Answer:
    headers = [("content-type", "application/json")] + ([("X-Session-ID", header)] if header is not None else [])
    headers += [("authorization", f"Bearer {key}")] if key is not None else []
    app = app_for(client) if key is None else app_for(client, keys=KEYS)
    return await Exchange(app, "POST", path, json.dumps(body).encode(), headers).finish()


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
    assert [submission.session for submission in client.submissions] == [session or ""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [*ROUTES, RESPONSES, MESSAGES])
async def test_each_api_tells_the_engine_the_headers_session(path: str, body: dict[str, Any], stream: bool) -> None:
    client = ScriptedClient([scheduled()], [finished()])
    assert (await ask(client, path, body | {"stream": stream}, "agent-7")).status == 200
    assert [submission.session for submission in client.submissions] == ["agent-7"]


async def test_a_response_tells_the_engine_its_cache_key() -> None:
    client = ScriptedClient([scheduled()], [finished()])
    path, body = RESPONSES
    assert (await ask(client, path, body | {"prompt_cache_key": "k"}, None)).status == 200
    assert [submission.session for submission in client.submissions] == ["k"]


async def test_a_user_is_no_session() -> None:
    """One user has many conversations, and each of them would take the others' turns for its own older ones."""
    client = ScriptedClient([scheduled()], [finished()])
    path, body = MESSAGES
    assert (await ask(client, path, body | {"metadata": {"user_id": "u"}}, None)).status == 200
    assert (await ask(client, "/v1/chat/completions", CHAT | {"user": "u"}, None)).status == 200
    assert [submission.session for submission in client.submissions] == ["", ""]


async def test_choices_without_a_session_stay_together_and_are_no_conversation() -> None:
    client = ScriptedClient([scheduled()], [finished()])
    assert (await ask(client, "/v1/chat/completions", CHAT | {"n": 2}, None)).status == 200
    assert client.sessions[0] is not None
    assert client.sessions[0] == client.sessions[1]
    assert [submission.session for submission in client.submissions] == ["", ""]


async def test_two_tenants_with_a_session_of_one_name_are_told_apart() -> None:
    client = ScriptedClient([scheduled()], [finished()])
    for key in (ANNS, BOBS):
        assert (await ask(client, "/v1/chat/completions", CHAT, "main", key)).status == 200
    assert [(one.tenant, one.session) for one in client.submissions] == [("ann", "main"), ("bob", "main")]


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
