"""Ray's own builder serves our server class, and our own builder serves what `chunkserve convert` makes of the same
config. Both are asked what the probes of Ray Serve LLM ask.

Never judges what a model says: only its form, its end, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.server import Server, starting
from serve_app.front.command.llm_config_file import convert_file
from tests.support.ray_llm import ON_CPU, SERVER, environment, ingress_fails, ray_config, written
from tests.support.serve_process import PYTHON_PROXY

pytestmark = [pytest.mark.server, pytest.mark.slow]

MODEL = "probed"
LLM_CONFIG: dict[str, Any] = {
    "model_loading_config": {"model_id": MODEL, "model_source": "smollm2-135m-instruct"},
    "engine_kwargs": {"max_model_len": 4096, "max_num_seqs": 16},
    "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    "runtime_env": {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
    **ON_CPU,
}
KINDS = ("behind Ray's ingress", "as our own application")


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ray")
    if request.param == KINDS[0]:
        if why := ingress_fails():
            pytest.skip(why)
        config, variables = ray_config({**LLM_CONFIG, "server_cls": SERVER}), environment()
    else:
        path: Path = written(directory / "ray.yaml", ray_config(LLM_CONFIG))
        config, variables = convert_file(path, None).config, PYTHON_PROXY
    with starting(config, variables) as started:
        started.wait_until_ready("/v1/models")
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


def asked(client: openai.OpenAI, *, chat: bool, stream: bool, text: str = "Say test.", **fields: Any) -> list[Any]:
    """Ask as Ray's probes do, and return the answer's chunks; a whole answer is one."""
    fields = {"model": MODEL, "temperature": 0.0, **fields}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if chat:
        messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]
        answer = client.chat.completions.create(messages=messages, **fields)
    else:
        answer = client.completions.create(prompt=text, **fields)
    return list(answer) if stream else [answer]


def text_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    parts = [getattr(choice, "delta", None) or getattr(choice, "message", None) or choice for choice in choices]
    return "".join((part.text if hasattr(part, "text") else part.content) or "" for part in parts)


BOTH = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
CHAT = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


@BOTH
@CHAT
@pytest.mark.parametrize("max_tokens", [1, 24])
def test_an_answer_ends_with_a_reason_that_agrees_with_its_number_of_tokens(
    client: openai.OpenAI, chat: bool, stream: bool, max_tokens: int
) -> None:
    chunks = asked(client, chat=chat, stream=stream, max_tokens=max_tokens, text="Tell me the story of three pigs.")
    (reason,) = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    used = chunks[-1].usage.completion_tokens
    assert used == max_tokens if reason == "length" else used <= max_tokens
    assert reason == "length" or max_tokens > 1


@CHAT
def test_a_streamed_answer_is_the_whole_one(client: openai.OpenAI, chat: bool) -> None:
    texts = {text_of(asked(client, chat=chat, stream=stream, max_tokens=16)) for stream in (True, False)}
    assert len(texts) == 1
    assert texts != {""}


@BOTH
def test_a_bad_temperature_is_a_400_that_names_it(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        asked(client, chat=False, stream=stream, temperature=-1.0)


@BOTH
def test_a_prompt_that_is_too_long_is_a_400_beside_others_that_are_answered(
    client: openai.OpenAI, stream: bool
) -> None:
    with ThreadPoolExecutor(4) as pool:
        too_long = pool.submit(asked, client, chat=False, stream=stream, text="test " * 20_000)
        others = [pool.submit(asked, client, chat=False, stream=stream, max_tokens=3) for _ in range(3)]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            too_long.result()
        assert all(other.result() for other in others)


@BOTH
def test_a_long_prompt_that_fits_is_answered(client: openai.OpenAI, stream: bool) -> None:
    text = " ".join(f"test{number}" for number in range(400))
    assert asked(client, chat=True, stream=stream, text=text, max_tokens=4)


@BOTH
@CHAT
def test_a_model_that_does_not_exist_is_a_404_that_says_so(client: openai.OpenAI, chat: bool, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        asked(client, chat=chat, stream=stream, model="this_model_does_not_exist", max_tokens=4)
    assert "Could not find" in refused.value.response.text


@BOTH
@pytest.mark.parametrize("alternatives", [0, 5])
def test_each_token_has_its_log_probability_and_bytes(client: openai.OpenAI, stream: bool, alternatives: int) -> None:
    chunks = asked(client, chat=True, stream=stream, max_tokens=8, logprobs=True, top_logprobs=alternatives)
    found = [one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    assert len(found) == chunks[-1].usage.completion_tokens
    for one in found:
        assert len(one.top_logprobs) == alternatives
        assert list(one.token.encode()) == one.bytes
    with pytest.raises(openai.BadRequestError):
        asked(client, chat=True, stream=stream, logprobs=True, top_logprobs=-1)


GAME = {
    "type": "object",
    "title": "The format of the answer",
    "properties": {
        "winner": {"type": "string", "maxLength": 20},
        "loser": {"type": "string", "maxLength": 20},
        "winner_score": {"type": "integer", "minimum": 0, "maximum": 99},
        "loser_score": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["winner", "loser", "winner_score", "loser_score"],
}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "expected", "schema": schema}}


def test_concurrent_answers_follow_their_schema(client: openai.OpenAI) -> None:
    def answer(_: int) -> dict[str, Any]:
        fields = {"response_format": schema_format(GAME), "text": "Who won the game? Answer in JSON."}
        found: dict[str, Any] = json.loads(text_of(asked(client, chat=True, stream=False, max_tokens=200, **fields)))
        return found

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(answer, range(3)):
            assert found.keys() == GAME["properties"].keys()


@BOTH
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_object", "schema": {}},
        {"type": "json_object", "schema": "{}"},
        {"type": "json_object", "schema": GAME},
        {"type": "json_object", "schema": json.dumps(GAME)},
    ],
    ids=["any", "an empty schema", "an empty schema as text", "a schema", "a schema as text"],
)
def test_each_form_of_json_mode_is_answered(
    client: openai.OpenAI, response_format: dict[str, Any], stream: bool
) -> None:
    chunks = asked(client, chat=True, stream=stream, max_tokens=24, response_format=response_format)
    assert text_of(chunks)[:1] in ("{", '"')  # an empty schema allows a string, too


def test_a_schema_with_an_unknown_type_is_a_400(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"name": {"type": "str"}}}
    with pytest.raises(openai.BadRequestError):
        asked(client, chat=True, stream=False, response_format=schema_format(bad))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": MODEL}),
        ("/v1/chat/completions", {"model": MODEL, "messages": "hi"}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "no_field": 1}),
        ("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": "many"}),
        ("/v1/embeddings", {"model": MODEL, "input": "hi"}),
    ],
    ids=["no messages", "messages that are none", "an unknown field", "tokens that are no number", "no embeddings"],
)
def test_a_body_that_is_wrong_is_a_400(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_texts_become_tokens_and_tokens_texts(server: Server) -> None:
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": "three pigs"}, timeout=60).json()
    assert tokens["count"] == len(tokens["tokens"]) > 1
    body = {"model": MODEL, "tokens": tokens["tokens"]}
    assert httpx.post(f"{server.url}/detokenize", json=body, timeout=60).json()["prompt"] == "three pigs"
