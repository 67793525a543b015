"""Owns the contract that every refusal of every route has its API's envelope, whatever the method, path or failure.
Never names the routes: it walks those that are declared, which a test of the document compares with the app's."""

from __future__ import annotations

import hashlib

import pytest

from engine.protocol import EngineError, ErrorCode, LoadSnapshot
from serve_app.api.anthropic.answer_schema import ErrorAnswer
from serve_app.api.openapi.operations import OPERATIONS, Operation
from serve_app.auth.keys import Keys
from serve_app.settings.auth import ApiKey
from tests.serve_app.harness import MODEL, Answer, Exchange, ScriptedClient, app_for

pytestmark = pytest.mark.anyio
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
SERVED = {"get": {"GET", "HEAD"}, "post": {"POST"}, "delete": {"DELETE"}}
SHA = hashlib.sha256(b"x").hexdigest()
GUARDED = Keys([ApiKey(tenant="ann", sha256=SHA)], SHA[::-1])

each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")


def refused(operation: Operation, answer: Answer, kind: str, code: str) -> None:
    """Check a refusal. Anthropic's envelope has no codes."""
    if operation.error is ErrorAnswer:
        assert answer.anthropic_error["type"] == kind
    else:
        assert (answer.error["type"], answer.error["code"]) == (kind, code)


async def ask(operation: Operation, method: str, client: ScriptedClient, keys: Keys | None = None) -> Answer:
    path = operation.path.replace("{model_id}", MODEL.id)
    return await Exchange(app_for(client, keys=keys), method, path, b"{").finish()


@each_operation
async def test_a_wrong_method_is_a_405_that_says_which_are_right(operation: Operation) -> None:
    served = set[str]().union(*(SERVED[one.method] for one in OPERATIONS if one.path == operation.path))
    for method in METHODS:
        if method in served:
            continue
        answer = await ask(operation, method, ScriptedClient())
        assert answer.status == 405
        refused(operation, answer, "invalid_request_error", "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == served


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.method == "get"], ids=lambda one: one.path)
async def test_head_has_the_status_and_the_headers_of_get(operation: Operation) -> None:
    answer = await ask(operation, "GET", ScriptedClient())
    head = await ask(operation, "HEAD", ScriptedClient())
    same = ("content-type", "content-length")
    assert head.status == answer.status
    assert [head.headers.get(name) for name in same] == [answer.headers.get(name) for name in same]


@each_operation
async def test_a_body_that_is_no_json_is_a_400_where_there_is_a_body(operation: Operation) -> None:
    keys = None if operation.needs != "admin key" else Keys(admin_sha256=SHA)
    client = ScriptedClient()
    path = operation.path.replace("{model_id}", MODEL.id)
    headers = [("content-type", "application/json"), ("x-api-key", "x")]
    answer = await Exchange(app_for(client, keys=keys), operation.method.upper(), path, b"{", headers).finish()
    if operation.body is None:
        unknown = "{response_id}" in operation.path or "{request_id}" in operation.path
        assert answer.status == (404 if unknown else 200)
    else:
        assert answer.status == 400
        refused(operation, answer, "invalid_request_error", "invalid_json")


@each_operation
async def test_a_route_that_needs_a_key_is_a_401_without_one(operation: Operation) -> None:
    answer = await ask(operation, operation.method.upper(), ScriptedClient(), GUARDED)
    if operation.needs == "nothing":
        assert answer.status == 200
    else:
        assert answer.status == 401
        refused(operation, answer, "authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["", "/v1", "/v1/", "/v1/chat", "/tokenize/", "/V1/models", "/admin", "//load"])
@pytest.mark.parametrize("method", METHODS)
async def test_an_unknown_path_is_a_404(method: str, path: str) -> None:
    answer = await Exchange(app_for(ScriptedClient()), method, path).finish()
    assert (answer.status, answer.error["type"], answer.error["code"]) == (404, "invalid_request_error", "not_found")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(EngineError(ErrorCode.ENGINE_DEAD, "/secret"), 503, "engine_dead"), (KeyError("/secret"), 500, "internal_error")],
    ids=str,
)
async def test_a_failure_of_a_small_route_is_an_envelope_that_shows_nothing(
    failure: Exception, status: int, code: str
) -> None:
    class Broken(ScriptedClient):
        async def load(self) -> list[LoadSnapshot]:
            raise failure

    answer = await Exchange(app_for(Broken()), "GET", "/load", headers=()).finish()
    assert (answer.status, answer.error["code"]) == (status, code)
    assert "secret" not in answer.error["message"]
