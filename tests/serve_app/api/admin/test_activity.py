"""Contracts of /activity: what it shows, to whom, and which questions it refuses.
Never goes through Ray; the engine is a real one in this process, over the fake executor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from serve_app.api.ingress import create_app
from serve_app.api.openapi.document import Access, openapi_document
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.settings.auth import ApiKey
from tests.serve_app.harness import MODEL, PROMPT, TIMEOUT_S, Exchange, LocalClient, ScriptedClient, app_for, get, post

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
DOCUMENT = openapi_document("1.2.3", Access(keys=True, admin=True))
TOLD = DOCUMENT["paths"]["/activity"]["get"]


@asynccontextmanager
async def local_app(**options: Any) -> AsyncIterator[ASGIApp]:
    engine = build_engine("", EngineConfig(executor="fake", fake=FakeConfig(step_delay_ms=2), **options))
    try:
        yield create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
    finally:
        await asyncio.to_thread(engine.shutdown)


async def activity(app: ASGIApp, query: str = "") -> dict[str, Any]:
    answer = await Exchange(app, "GET", f"/activity{query}", headers=()).finish()
    assert answer.status == 200
    schema = TOLD["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer.json)
    return dict(answer.json)


async def test_a_long_prompt_shares_its_steps_with_a_stream_and_one_sees_it() -> None:
    async with local_app(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=1000) as app:
        body = json.dumps(PROMPT | {"max_tokens": 150, "ignore_eos": True, "stream": True}).encode()
        stream = Exchange(app, "POST", COMPLETIONS, body)
        await stream.next()
        await stream.next()
        assert (await post(app, COMPLETIONS, PROMPT | {"prompt": "x" * 100, "max_tokens": 1})).status == 200
        (engine,) = (await activity(app))["engines"]
        await stream.task
    shared = [step for step in engine["steps"] if step["decodes"] and step["chunks"]]
    assert sum(sum(step["chunks"]) for step in shared) == 100
    assert len(shared) >= 100 / 16
    assert engine["num_running"] == 1
    assert 0 < engine["num_held_blocks"] <= engine["num_blocks"]
    assert (engine["max_num_seqs"], engine["max_num_batched_tokens"]) == (4, 16)
    assert engine["prompt_tokens_per_s"] > 0 < engine["generated_tokens_per_s"]
    assert 0 < engine["gap_p50_ms"] <= engine["gap_p99_ms"]


async def test_steps_that_are_known_are_not_told_again() -> None:
    async with local_app() as app:
        assert (await post(app, COMPLETIONS, PROMPT | {"max_tokens": 5, "ignore_eos": True})).status == 200
        (first,) = (await activity(app))["engines"]
        ids = [step["id"] for step in first["steps"]]
        assert ids == sorted(set(ids))
        assert len(ids) == 5
        (rest,) = (await activity(app, f"?after=gone:99&after={first['engine']}:{ids[2]}"))["engines"]
        assert [step["id"] for step in rest["steps"]] == ids[3:]
        (other,) = (await activity(app, "?after=gone:99"))["engines"]
        assert [step["id"] for step in other["steps"]] == ids


async def test_an_engine_that_has_done_nothing_has_no_gaps_and_no_steps() -> None:
    async with local_app() as app:
        told = await activity(app)
    (engine,) = told["engines"]
    assert (engine["steps"], engine["gap_p50_ms"], engine["gap_p99_ms"]) == ([], None, None)
    assert told["model"] == MODEL.id
    assert [one["ingress"] for one in told["ingresses"]] == ["ingress-1"]


async def test_what_is_known_of_each_engine_is_passed_on() -> None:
    client = ScriptedClient()
    told = await activity(app_for(client), "?after=a:1&after=b:22&after=a:3")
    assert client.asked_after == [{"a": 3, "b": 22}]
    assert told == {"model": MODEL.id, "engines": [], "ingresses": [], "num_missing": 0}


@pytest.mark.parametrize(
    ("query", "param", "told"),
    [
        ("?since=3", "since", "since: is no parameter"),
        ("?after=a:1&colour=red", "colour", "colour: is no parameter"),
        ("?after=12", "after", "'12'"),
        ("?after=a:-1", "after", "'a:-1'"),
        ("?after=a:", "after", "'a:'"),
        ("?after=", "after", "''"),
        ("?after=a:%D9%A1", "after", "'a:\u0661'"),  # a digit of another script
        (f"?after={'a' * 65}:1", "after", "aaa"),
        (f"?after=a:{'9' * 19}", "after", "999"),
        ("?" + "&".join(["after=a:1"] * 1001), "after", "at most 1000 values, and these are 1001"),
    ],
)
async def test_a_question_that_is_wrong_is_refused_by_its_name(query: str, param: str, told: str) -> None:
    client = ScriptedClient()
    answer = await get(client, f"/activity{query}")
    assert answer.status == 400
    assert answer.error["param"] == param
    assert told in answer.error["message"]
    assert client.asked_after == []


async def test_it_needs_no_key_and_tells_only_what_the_document_says() -> None:
    app = app_for(ScriptedClient(), keys=Keys([ApiKey(tenant="ann", sha256="0" * 64)]))
    assert "ann" not in json.dumps(await activity(app))
    assert "security" not in TOLD


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_other_methods_are_refused_in_our_envelope(method: str) -> None:
    answer = await asyncio.wait_for(get(ScriptedClient(), "/activity", method), TIMEOUT_S)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
