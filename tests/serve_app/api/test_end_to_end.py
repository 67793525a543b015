"""Owns the proof that a real client, a real port and a real engine (with the fake executor) agree.
Never leaves a server or an engine behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import openai
import pytest
import uvicorn
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig, Targets
from engine.kv_tiers import Tier, TierLoad
from engine.protocol import EngineError, ErrorCode, LoadSnapshot
from serve_app.api.ingress import create_app
from serve_app.api.openapi.document import Access, openapi_document
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Exchange,
    LocalClient,
    ScriptedClient,
    app_for,
    finished,
    joined_choice,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

REPLY = "Bonjour à tous 🦜. The end."


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """Serve the app on a free port of the loopback interface; end it whatever happens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        running = asyncio.ensure_future(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def openai_client(app: ASGIApp) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(app) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client,
    ):
        yield client


MakeApp = Callable[..., ASGIApp]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Return a function that builds the app over a real engine that answers with `reply`;
    engines are shut down at the end."""
    engines: list[AsyncEngine] = []

    def build(**config: object) -> ASGIApp:
        fake = config.pop("fake", FakeConfig(reply=REPLY))
        engine = build_engine("", EngineConfig(executor="fake", fake=fake, **config))  # type: ignore[arg-type]
        engines.append(engine)
        return create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)

    yield build
    for engine in engines:
        engine.shutdown()


async def test_openais_client_gets_the_same_chat_answer_whole_and_streamed(make_app: MakeApp) -> None:
    async with openai_client(make_app()) as client:
        whole = await client.chat.completions.create(**CHAT)
        assert whole.choices[0].message.content == REPLY
        assert whole.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(REPLY.encode()) + 1


async def test_openais_client_gets_completions_models_and_typed_errors(make_app: MakeApp) -> None:
    async with openai_client(make_app()) as client:
        answer = await client.completions.create(model=MODEL.id, prompt="x", stop="tous", max_tokens=20)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Bonjour à ", "stop")
        stream = await client.completions.create(model=MODEL.id, prompt="x", max_tokens=7, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Bonjour"
        assert [model.id async for model in client.models.list()] == [MODEL.id]
        assert (await client.models.retrieve(MODEL.id)).id == MODEL.id
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, modalities=["text", "audio"])
        assert (refused.value.param, refused.value.code) == ("modalities", "unsupported_parameter")
        assert refused.value.request_id


async def test_openais_client_raises_when_a_stream_fails_in_the_middle() -> None:
    fault = EngineError(ErrorCode.STEP_FAILED, "x")
    async with openai_client(app_for(ScriptedClient([scheduled()], tokens("a"), fault))) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError, match="failed to compute"):
            [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[], [[scheduled()], tokens("abc")]], ids=["before any event", "after tokens"])
async def test_a_connection_that_is_closed_aborts_the_request(stream: bool, script: list[list[object]]) -> None:
    client = ScriptedClient(*script, asyncio.Event())  # type: ignore[arg-type]
    body = json.dumps(CHAT | {"stream": stream})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with served(app_for(client)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await asyncio.wait_for(client.started.wait(), TIMEOUT_S)
        writer.close()
        await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)


async def test_leaving_a_real_engine_frees_its_place(make_app: MakeApp) -> None:
    app = make_app(max_num_seqs=1, max_queued_requests=0, fake=FakeConfig(step_delay_ms=2))
    body = json.dumps(CHAT | {"stream": True}).encode()
    first = Exchange(app, "POST", "/v1/chat/completions", body)
    await first.next()
    refused = await post(app, "/v1/chat/completions", CHAT)
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "queue_full", "1")
    first.disconnect()
    await asyncio.wait_for(first.task, TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        while (await post(app, "/v1/chat/completions", CHAT | {"max_tokens": 1})).status == 503:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fields", [{}, {"seed": 5, "temperature": 1.5}, {"max_tokens": 40}], ids=str)
async def test_streamed_and_whole_answers_have_the_same_text(make_app: MakeApp, fields: dict[str, object]) -> None:
    app = make_app(fake=FakeConfig())
    whole = await post(app, "/v1/chat/completions", CHAT | {"seed": 1} | fields)
    streamed = await post(app, "/v1/chat/completions", CHAT | {"seed": 1} | fields | {"stream": True})
    assert streamed.text == whole.json["choices"][0]["message"]["content"]
    assert whole.json["choices"][0]["finish_reason"] == "length"


async def test_many_streams_at_once_each_get_their_own_answer(make_app: MakeApp) -> None:
    app = make_app(fake=FakeConfig())
    bodies = [{"model": MODEL.id, "prompt": f"prompt {n}", "temperature": 0, "stream": True} for n in range(20)]
    together = await asyncio.gather(*(post(app, "/v1/completions", body) for body in bodies))
    alone = [await post(app, "/v1/completions", body) for body in bodies]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


SCORED_PROMPT = "Un long texte, près de sept blocs : 🦜 " * 3  # 129 tokens: more than eight steps of 16


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_scores_of_a_prompt_in_many_chunks_are_those_of_a_prompt_in_one(
    make_app: MakeApp, max_tokens: int
) -> None:
    body = {"model": MODEL.id, "prompt": SCORED_PROMPT, "echo": True, "logprobs": 2, "temperature": 0}
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    choices: list[dict[str, Any]] = []
    for budget in (512, 64, 32, 16):
        app = make_app(max_num_batched_tokens=budget, max_num_seqs=8, fake=FakeConfig())
        answer = (await post(app, "/v1/completions", body)).json
        (load,) = (await Exchange(app, "GET", "/load").finish()).json["engines"]
        assert load["num_steps"] >= len(SCORED_PROMPT.encode()) // budget
        assert answer["usage"]["prompt_tokens"] == len(SCORED_PROMPT.encode())
        assert answer["usage"]["completion_tokens"] == max_tokens
        streamed = await post(app, "/v1/completions", body | {"stream": True})
        choices += [answer["choices"][0], joined_choice(streamed)]
    first = choices[0]
    assert [choice for choice in choices if choice != first] == []
    assert first["text"].startswith(SCORED_PROMPT)
    assert (len(first["text"]), first["finish_reason"]) == (len(SCORED_PROMPT) + max_tokens, "length")
    logprobs = first["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(SCORED_PROMPT.encode()) + max_tokens}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(score <= 0 for score in logprobs["token_logprobs"][1:])
    assert len(set(logprobs["token_logprobs"])) > 10, "scores that differ from position to position"
    for token, score, top in zip(
        *(logprobs[key][1:] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == score
        assert 2 <= len(top) <= 3


async def test_openais_client_reads_scores_and_every_token_counted_has_one(make_app: MakeApp) -> None:
    """The request is that of lm-evaluation-harness:
    the prompt as token ids, and one token more, whose scores are cut off."""
    async with openai_client(make_app()) as client:
        answer = await client.completions.create(
            model=MODEL.id, prompt=list(b"to be"), echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        ended = await client.completions.create(model=MODEL.id, prompt="x", logprobs=0, temperature=0, max_tokens=99)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["t", "o", " ", "b", "e", REPLY[0]]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs is not None
    assert all(isinstance(score, float) for score in logprobs.token_logprobs[1:])
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == (REPLY, "stop")
    assert ended.choices[0].logprobs is not None
    assert ended.usage is not None
    assert len(ended.choices[0].logprobs.tokens or ()) == ended.usage.completion_tokens


async def test_load_tells_what_each_engine_runs_and_holds(make_app: MakeApp) -> None:
    app = make_app(num_kv_blocks=8)
    await Exchange(app, "POST", "/v1/completions", json.dumps({**PROMPT, "max_tokens": 3}).encode()).finish()
    (load,) = (await Exchange(app, "GET", "/load").finish()).json["engines"]
    assert load.pop("num_steps") >= 3
    assert load == {
        "num_running": 0,
        "num_waiting": 0,
        "num_preparing": 0,
        "num_waiting_preempted": 0,
        "wait_reason": None,
        "num_queued_tokens": 0,
        "num_blocks": 8,
        "num_held_blocks": 0,
        "num_evictable_blocks": 0,
        "num_reserved_blocks": 0,
        "num_preemptions": 0,
        "reserve_ratio": 0.7,
        "reserve_margin": 0.5,
        "step_times": None,
        "queued_prefill_s": None,
        "prefill_costs": None,
        "idle_prefill_costs": None,
        "graph_hits": {},
        "graph_misses": {},
        "tiers": [],
        "num_loading": 0,
        "rank_late_s": [],
    }


async def test_load_tells_of_each_tier_by_name_as_the_document_says() -> None:
    """Regression: they were a list of numbers."""

    class Tiered(ScriptedClient):
        async def load(self) -> list[LoadSnapshot]:
            (load,) = await super().load()
            host = TierLoad(Tier.HOST, num_blocks=3, hit_blocks=2, load_s=0.5)
            return [replace(load, tiers=(host, TierLoad(Tier.DISK, used_bytes=7)), num_loading=1)]

    (load,) = (await Exchange(app_for(Tiered()), "GET", "/load").finish()).json["engines"]
    host, disk = load["tiers"]
    assert load["num_loading"] == 1
    assert (host["tier"], host["num_blocks"], host["hit_blocks"], host["load_s"]) == ("host", 3, 2, 0.5)
    assert (disk["tier"], disk["used_bytes"]) == ("disk", 7)
    assert tuple(host) == tuple(spec.name for spec in fields(TierLoad))
    document = openapi_document("1.2.3", Access(keys=False, admin=False))
    schema = {"$ref": "#/components/schemas/LoadSnapshot", "components": document["components"]}
    Draft202012Validator(schema).validate(load)
    assert not Draft202012Validator(schema).is_valid(load | {"tiers": [list(host.values())]})


async def test_load_names_how_predicted_step_times_are_corrected_and_what_prefill_takes() -> None:
    """Regression: it was a list of three numbers."""
    engine = build_engine("", EngineConfig(executor="fake", targets=Targets(ttft_ms=1000)))
    app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
    (load,) = (await Exchange(app, "GET", "/load").finish()).json["engines"]
    assert load["step_times"] == {"scale": 1.0, "extra_s": 0.0, "deviation": 0.0}
    assert load["queued_prefill_s"] == 0
    assert load["prefill_costs"].keys() == load["idle_prefill_costs"].keys() == {"token_s", "pair_s"}
    engine.shutdown()


async def test_a_dead_engine_is_unhealthy_and_refuses(make_app: MakeApp) -> None:
    engine = build_engine("", EngineConfig(executor="fake"))
    app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
    assert (await Exchange(app, "GET", "/health").finish()).status == 200
    engine.shutdown()
    assert (await Exchange(app, "GET", "/health").finish()).status == 503
    answer = await post(app, "/v1/chat/completions", CHAT)
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")


async def test_an_answer_that_ends_at_once_is_whole() -> None:
    async with openai_client(app_for(ScriptedClient([scheduled(), *tokens("ok"), finished()]))) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ok"
