"""Owns the contract of /v1/embeddings: OpenAI's body, unit vectors, and a clear refusal if a model has none.
Never says what a vector is good for; tests/golden compares pooled states with transformers'."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from openai.types import CreateEmbeddingResponse
from starlette.types import ASGIApp

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig
from engine.fake.executor import HIDDEN_SIZE
from engine.protocol import Event, Pooled, SamplingParams, Submission
from serve_app.api.generation.completion import Completion
from serve_app.api.generation.live import Lifecycle
from serve_app.api.ingress import create_app
from serve_app.api.openai.choices import Choices
from serve_app.api.openai.embeddings import normalized, prepare_embeddings
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.prompt_schema import MAX_INPUTS
from serve_app.api.requests.schema import parse_request
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import StreamRecord
from serve_app.metrics.request_times import RequestTimes
from tests.serve_app.harness import CHAT, MODEL, Answer, LocalClient, ScriptedClient, app_for, finished, post, scheduled

pytestmark = pytest.mark.anyio
TEXT = {"model": MODEL.id, "input": "hi there"}


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    engine = build_engine("", EngineConfig(executor="fake", max_model_len=MODEL.max_model_len, max_prefill_tokens=16))
    yield engine
    engine.shutdown()


def app_of(engine: AsyncEngine, pooling: Literal["mean", "last"] = "mean") -> ASGIApp:
    return create_app(LocalClient(engine), Tokenizer.byte_level(), replace(MODEL, pooling=pooling))


async def embed(app: ASGIApp, **fields: Any) -> Answer:
    return await post(app, "/v1/embeddings", TEXT | fields)


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.json
    assert [item["index"] for item in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [item["embedding"] for item in answer.json["data"]]


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_a_text_becomes_the_engines_vector_made_to_length_one(
    engine: AsyncEngine, pooling: Literal["mean", "last"]
) -> None:
    answer = await embed(app_of(engine, pooling))
    (vector,) = vectors(answer)
    tokens = Tokenizer.byte_level().encode("hi there")
    events = [event async for event in engine.generate(tokens, SamplingParams(max_tokens=0), pooling=pooling)]
    (pooled,) = (event.values for event in events if isinstance(event, Pooled))
    assert len(vector) == HIDDEN_SIZE
    assert vector == pytest.approx([value / math.hypot(*pooled) for value in pooled])
    CreateEmbeddingResponse.model_validate(answer.json, strict=True)
    assert answer.json.keys() == {"object", "data", "model", "usage"}
    assert answer.json["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


async def test_inputs_are_embedded_each_by_itself_and_in_order(engine: AsyncEngine) -> None:
    app = app_of(engine)
    alone = [vectors(await embed(app, input=text))[0] for text in ("one", "a second, longer than a step takes", "3")]
    together = await embed(app, input=["one", "a second, longer than a step takes", "3"])
    assert vectors(together) == [pytest.approx(vector) for vector in alone]
    assert together.json["usage"]["prompt_tokens"] == 3 + 34 + 1
    as_tokens = await embed(app, input=[list(b"one"), list(b"3")])
    assert vectors(as_tokens) == [pytest.approx(alone[0]), pytest.approx(alone[2])]
    assert vectors(await embed(app, input=list(b"one"))) == [pytest.approx(alone[0])]


class Counting(LocalClient):
    """Counts the requests that the engine has at the same time."""

    num_open = most_open = 0

    async def _stream(self, submission: Submission, record: StreamRecord) -> AsyncGenerator[list[Event], None]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with aclosing(super()._stream(submission, record)) as items:
                async for events in items:
                    yield events
        finally:
            self.num_open -= 1


async def test_hundreds_of_inputs_are_embedded_in_order_and_no_more_than_128_at_a_time(engine: AsyncEngine) -> None:
    """LangChain sends a thousand in a request, and OpenAI takes 2,048."""
    client = Counting(engine)
    app = create_app(client, Tokenizer.byte_level(), replace(MODEL, pooling="mean"))
    words = [list(f"{number}".encode()) for number in range(300)]
    found = vectors(await embed(app, input=words))
    assert client.most_open == 128
    for place in (0, 127, 128, 299):
        assert [found[place]] == [pytest.approx(vector) for vector in vectors(await embed(app, input=words[place]))]


@pytest.mark.parametrize("given", ["a", [97]], ids=["texts", "token ids"])
async def test_the_event_loop_runs_while_thousands_of_inputs_are_prepared(given: Any) -> None:
    """Regression: streams stood still for a tenth of a second."""
    body = json.dumps({"model": MODEL.id, "input": [given] * MAX_INPUTS}).encode()
    request, model = parse_request(EmbeddingRequest, body), replace(MODEL, pooling="mean")
    client, lifecycle, rounds = ScriptedClient(), Lifecycle(), 0
    ticket, times = Mock(), RequestTimes()

    async def others() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    running = asyncio.ensure_future(others())
    groups = await prepare_embeddings(request, "a", Tokenizer.byte_level(), model, Mock())
    prepared, rounds = rounds, 0
    choices = await Choices.of(groups, lambda one: Completion(client, one, lifecycle, ticket, times, None))
    running.cancel()
    assert len(choices) == MAX_INPUTS
    assert min(prepared, rounds) > MAX_INPUTS // 100


async def test_base64_holds_the_same_numbers(engine: AsyncEngine) -> None:
    """OpenAI's client asks for base64 unless it is told otherwise."""
    app = app_of(engine)
    (written,) = vectors(await embed(app, encoding_format="base64"))
    numbers = array("f", base64.b64decode(str(written)))
    assert list(numbers) == pytest.approx(vectors(await embed(app))[0], abs=1e-6)


@pytest.mark.parametrize("values", [(0.1, -3e-300, 7e20), (0.0, 0.0, 0.0)])
async def test_numbers_of_double_precision_are_kept_and_written_to_their_last_bit(values: tuple[float, ...]) -> None:
    client = ScriptedClient([scheduled()], [Pooled("a", values), finished()])
    answer = await embed(app_for(client, model=replace(MODEL, pooling="mean")))
    assert vectors(answer) == [normalized(values)]


async def test_an_input_that_is_too_long_is_refused_or_cut_where_asked(engine: AsyncEngine) -> None:
    app, long = app_of(engine), "x" * 300
    refused = await embed(app, input=["short", long])
    assert refused.status == 400
    assert refused.json["error"]["code"] == "context_length_exceeded"
    assert refused.json["error"]["param"] == "input.1"
    for most, kept in ((-1, MODEL.max_model_len), (5, 5)):
        cut = await embed(app, input=long, truncate_prompt_tokens=most)
        assert cut.json["usage"]["prompt_tokens"] == kept
    whole = await embed(app, input="x" * MODEL.max_model_len)
    assert whole.json["usage"]["prompt_tokens"] == MODEL.max_model_len


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": [1.5]}, "input.0"),
        ({"input": [999]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 3}, "dimensions"),
        ({"stream": True}, "stream"),
        ({"temperature": 1.0}, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    engine: AsyncEngine, fields: dict[str, Any], param: str
) -> None:
    answer = await embed(app_of(engine), **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert engine.load().num_steps == 0


async def test_a_model_that_makes_none_says_which_setting_decides() -> None:
    client = ScriptedClient([scheduled(), finished()])
    answer = await post(app_for(client), "/v1/embeddings", TEXT)
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")
    assert "`pooling`" in answer.json["error"]["message"]
    assert not client.submissions


async def test_another_model_is_not_found() -> None:
    answer = await post(app_for(ScriptedClient()), "/v1/embeddings", TEXT | {"model": "other"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


async def test_embeddings_and_chats_share_an_engine(engine: AsyncEngine) -> None:
    app = app_of(engine)
    before = vectors(await embed(app))
    assert (await post(app, "/v1/chat/completions", CHAT | {"max_tokens": 4})).status == 200
    assert vectors(await embed(app)) == before
    assert json.dumps(before)  # plain numbers
