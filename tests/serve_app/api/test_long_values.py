"""Values in errors are short enough to be read, whichever field they came from and whatever part refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.config import EngineConfig
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.errors.api_error import ApiError
from tests.serve_app.harness import CHAT, MODEL, PROMPT, Exchange, LocalClient, ScriptedClient, app_for, post

DIGITS = 401
HUGE = int("9" * DIGITS)
LONG = "x" * 5000
MESSAGE = {"model": MODEL.id, "max_tokens": 5, "messages": CHAT["messages"]}
RESPONSE = {"model": MODEL.id, "input": "a"}

pytestmark = pytest.mark.anyio


@pytest.fixture
def app() -> Iterator[ASGIApp]:
    """Make an app over a real engine, which refuses some values itself."""
    engine = build_engine("m", EngineConfig(executor="fake"))
    yield create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
    engine.shutdown()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT | {"min_tokens": HUGE}),
        ("/v1/completions", PROMPT | {"min_tokens": HUGE, "max_tokens": 5}),
        ("/v1/completions", PROMPT | {"n": HUGE}),
        ("/v1/completions", PROMPT | {"seed": HUGE}),
        ("/v1/completions", PROMPT | {"priority": -HUGE}),
        ("/v1/completions", PROMPT | {"prompt": [HUGE]}),
        ("/v1/completions", PROMPT | {"logit_bias": {"9" * DIGITS: 1}}),
        ("/v1/completions", PROMPT | {"stop_token_ids": [HUGE]}),
        ("/v1/completions", PROMPT | {"timeout_ms": HUGE}),
        ("/v1/completions", PROMPT | {"model": LONG}),
        ("/v1/completions", PROMPT | {LONG: 1}),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": LONG}}),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "(" * 5000}}),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"grammar": LONG}}),
        ("/v1/chat/completions", CHAT | {"tool_choice": LONG}),
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": LONG}),
        ("/v1/messages", MESSAGE | {"model": LONG}),
        ("/v1/responses", RESPONSE | {"previous_response_id": LONG}),
        ("/detokenize", {"tokens": [HUGE]}),
        ("/tokenize", {"model": LONG, "prompt": "a"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_no_error_repeats_a_long_value(app: ASGIApp, path: str, body: dict[str, Any]) -> None:
    answer = await post(app, path, body)
    assert answer.status in (400, 404)
    check_short(answer.json["error"]["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": HUGE}),
        ("/v1/completions", PROMPT | {"max_tokens": HUGE}),
        ("/v1/messages", MESSAGE | {"max_tokens": HUGE}),
        ("/v1/responses", RESPONSE | {"max_output_tokens": HUGE}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_strict_server_repeats_no_long_value_either(path: str, body: dict[str, Any]) -> None:
    """Regression: a `max_tokens` of 401 digits was repeated whole."""
    answer = await post(app_for(ScriptedClient(), strict=True), path, body)
    assert answer.status == 400
    check_short(answer.json["error"]["message"])


@pytest.mark.parametrize(("name", "value"), [("Request-Timeout-Ms", "9" * DIGITS), ("Request-Timeout-Ms", LONG)])
async def test_no_error_repeats_a_long_header(app: ASGIApp, name: str, value: str) -> None:
    headers = [("content-type", "application/json"), (name, value)]
    answer = await Exchange(app, "POST", "/v1/completions", b'{"model": "org/tiny", "prompt": "a"}', headers).finish()
    assert answer.status == 400
    check_short(answer.error["message"])


def check_short(message: str) -> None:
    assert "9" * 21 not in message
    assert "x" * 101 not in message
    assert "(" * 101 not in message
    assert message


def test_a_number_that_was_shortened_says_how_long_it_was() -> None:
    assert ApiError(400, f"max_tokens is {HUGE}, not 5.").message == "max_tokens is 9999999999… (401 digits), not 5."
    assert ApiError(400, f"seed is {2**64}.").message == f"seed is {2**64}.", "what fits 64 bits is written out"
