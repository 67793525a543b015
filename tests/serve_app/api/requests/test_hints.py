"""Owns the promise that a hint is accepted, named in the response and counted, and refused by a strict server.
Never says which fields are hints: the schemas do, and what holds for one hint is checked for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from serve_app.admission.gate import Gate
from serve_app.api.http.hint_header import HEADER, TellsHints
from serve_app.api.openapi.operations import OPERATIONS
from serve_app.api.requests.hints import hints
from serve_app.api.requests.strict_model import StrictModel
from serve_app.errors.api_error import from_validation
from serve_app.errors.refusal import is_anthropic
from serve_app.metrics.ingress_recorder import IngressRecorder
from tests.serve_app.harness import CHAT, MODEL, PROMPT, ScriptedClient, app_for, finished, post, scheduled, tokens

pytestmark = pytest.mark.anyio

BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/embeddings": {"model": MODEL.id, "input": "hi"},
    "/v1/responses": {"model": MODEL.id, "input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
}
"""The least that a route accepts."""
OTHER = {"as": "nobody has it"}
"""A value that has no meaning in any field."""


def models(base: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    """Yield all schemas of requests, which importing `operations` has defined."""
    for model in base.__subclasses__():
        if model.__module__.startswith("serve_app."):
            yield model
        yield from models(model)


HINTS = [pytest.param(model, name, id=f"{model.__name__}-{name}") for model in models() for name in model.hints]
HINTS_OF_BODIES = [
    pytest.param(one.path, name, id=f"{one.path}-{name}")
    for one in OPERATIONS
    if one.path in BODIES and one.body is not None and issubclass(one.body, StrictModel)
    for name in one.body.hints
]


def counted(recorder: IngressRecorder) -> dict[str, Any]:
    return {s.labels[0]: s.value for s in recorder.samples() if s.name == "chunkserve:ignored_fields"}


def answering() -> ScriptedClient:
    return ScriptedClient([scheduled()], [*tokens("hello"), finished()])


@pytest.mark.parametrize("stream", [False, True])
async def test_hints_of_a_request_are_named_in_its_response_and_counted(stream: bool) -> None:
    recorder = IngressRecorder(Gate())
    app = app_for(answering(), recorder=recorder)
    body = CHAT | {"verbosity": "high", "service_tier": "flex", "stream": stream}
    answer = await post(app, "/v1/chat/completions", body)
    assert (answer.status, answer.headers[HEADER]) == (200, "verbosity, service_tier")
    await post(app, "/v1/completions", PROMPT | {"service_tier": "priority"})
    assert counted(recorder) == {"verbosity": 1, "service_tier": 2}


async def test_a_hint_that_asks_for_what_is_done_anyway_is_not_named() -> None:
    recorder = IngressRecorder(Gate())
    body = CHAT | {"verbosity": "medium", "service_tier": None}
    answer = await post(app_for(answering(), recorder=recorder), "/v1/chat/completions", body)
    assert (answer.status, HEADER in answer.headers, counted(recorder)) == (200, False, {})


async def test_a_refusal_names_the_hints_that_were_read_before() -> None:
    answer = await post(app_for(answering()), "/v1/chat/completions", CHAT | {"verbosity": "high", "seed": "x"})
    assert (answer.status, answer.headers[HEADER]) == (400, "verbosity")


async def test_a_strict_server_refuses_hints_by_name() -> None:
    recorder, client = IngressRecorder(Gate()), answering()
    app = app_for(client, recorder=recorder, strict=True)
    error = (await post(app, "/v1/chat/completions", CHAT | {"verbosity": "high"})).error
    assert (error["param"], error["code"]) == ("verbosity", "unsupported_parameter")
    assert "leave it out, or send one of: null, " in error["message"]
    assert not client.submissions
    assert counted(recorder) == {}


def test_no_field_is_of_two_classes() -> None:
    for model in models():
        honoured = {field.alias or name for name, field in model.model_fields.items()}
        assert not model.hints.keys() & model.unsupported.keys(), model
        assert not honoured & (model.hints.keys() | model.unsupported.keys()), model


async def read(model: type[StrictModel], data: dict[str, Any], *, strict: bool) -> tuple[tuple[str, ...], Any]:
    """Read an object of that kind; return its hints, and the first mistake in it."""
    named: list[tuple[str, ...]] = []
    mistakes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            model.model_validate(data)
        except ValidationError as error:
            mistakes.append(from_validation(error))
        named.append(hints().names)

    async def receive() -> Any:
        raise AssertionError("nothing is sent")

    async def send(message: Any) -> None:
        raise AssertionError("nothing is answered")

    await TellsHints(app, strict=strict, count=lambda names: None)({"type": "http"}, receive, send)
    return named[0], next(iter(mistakes), None)


@pytest.mark.parametrize(("model", "name"), HINTS)
async def test_each_hint_of_each_schema_is_taken_and_named_or_refused_by_name(
    model: type[StrictModel], name: str
) -> None:
    """This holds whatever else the object lacks, because hints are read first."""
    assert all(value != OTHER for value in model.hints[name])
    named, mistake = await read(model, {name: OTHER}, strict=False)
    assert named == (f"{model.hint_path}{name}",)
    assert mistake is None or name not in mistake.message
    named, mistake = await read(model, {name: OTHER}, strict=True)
    assert (named, mistake.param, mistake.code) == ((), name, "unsupported_parameter")
    for neutral in (None, *model.hints[name]):
        named, mistake = await read(model, {name: neutral}, strict=True)
        assert named == ()
        assert mistake is None or mistake.code != "unsupported_parameter"


def test_a_hint_is_named_by_where_it_stands() -> None:
    """A hint of an object within a body is named with its path.
    The name is a label of a metric, and unlike any name of the body's own."""
    bodies = {one.body for one in OPERATIONS}
    for model in models():
        if model.hints and not {model, *model.__subclasses__()} & bodies:
            assert model.hint_path.endswith("."), model


@pytest.mark.parametrize(("path", "name"), HINTS_OF_BODIES)
async def test_each_hint_of_a_body_is_named_in_the_response_or_refused_by_name(path: str, name: str) -> None:
    client = answering()
    taken = await post(app_for(client), path, BODIES[path] | {name: OTHER})
    assert taken.headers[HEADER] == name
    assert taken.status == 200 or path == "/v1/embeddings"  # which the tests' model does not make
    strict = await post(app_for(answering(), strict=True), path, BODIES[path] | {name: OTHER})
    assert (strict.status, HEADER in strict.headers) == (400, False)
    error = strict.anthropic_error if is_anthropic({"path": path}) else strict.error
    assert f"{name}: this field is not supported by the server" in error["message"]
    assert is_anthropic({"path": path}) or (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
async def test_an_answers_length_that_is_cut_is_named_as_the_client_wrote_it(path: str, field: str) -> None:
    recorder = IngressRecorder(Gate())
    body = BODIES[path] | {field: MODEL.max_model_len}
    answer = await post(app_for(answering(), recorder=recorder), path, body)
    assert (answer.status, answer.headers[HEADER], counted(recorder)) == (200, field, {field: 1})


async def test_the_one_of_two_lengths_that_wins_is_named() -> None:
    body = CHAT | {"max_tokens": 5, "max_completion_tokens": MODEL.max_model_len}
    answer = await post(app_for(answering()), "/v1/chat/completions", body)
    assert answer.headers[HEADER] == "max_completion_tokens"


@pytest.mark.parametrize(
    "promise",
    [
        {"data_collection": "deny"},
        {"zdr": True},
        {"max_price": {"prompt": 0}},
        {"only": ["a"]},
        {"quantizations": ["fp8"]},
    ],
    ids=str,
)
async def test_what_a_choice_of_provider_promises_is_no_hint(promise: dict[str, Any]) -> None:
    """Privacy, a price and a format of the weights are promises; an order of preference is a hint."""
    client = answering()
    error = (await post(app_for(client), "/v1/chat/completions", CHAT | {"provider": promise})).error
    assert (error["param"], error["code"]) == (f"provider.{next(iter(promise))}", "unsupported_parameter")
    assert not client.submissions
    answer = await post(app_for(client), "/v1/chat/completions", CHAT | {"provider": {"order": ["a"], "zdr": False}})
    assert (answer.status, answer.headers[HEADER]) == (200, "provider.order")
