"""Owns the contract of /openapi.json, /docs and /version. Long: tables of good and bad bodies for every route.
Never compares with a stored copy: the document is compared with routes, models, refusals and real answers."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from engine.protocol import ErrorCode
from serve_app.api.generation.completion import Piece
from serve_app.api.http.hint_header import HEADER as HINTS_HEADER
from serve_app.api.http.hint_header import TellsHints
from serve_app.api.openai.answer_schema import FinishReason
from serve_app.api.openapi import about
from serve_app.api.openapi.docs_page import render
from serve_app.api.openapi.document import Access, openapi_document
from serve_app.api.openapi.operations import OPERATIONS
from serve_app.api.requests.schema import parse_request
from serve_app.auth.keys import Keys
from serve_app.errors.api_error import ENGINE_RULES, ApiError
from serve_app.settings.auth import ApiKey
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Answer,
    Exchange,
    ScriptedClient,
    app_for,
    chat,
    complete,
    finished,
    get,
    post,
    scheduled,
    tokens,
)

FIRST_SERVER = (Path(__file__).parents[4] / "docs" / "tutorials" / "first-server.md").read_text()
SHA = hashlib.sha256(b"x").hexdigest()
OPEN, GUARDED = Access(keys=False, admin=False), Access(keys=True, admin=True)
KEYS = Keys([ApiKey(tenant="ann", sha256=SHA)], SHA[::-1])
DOCUMENT = openapi_document("1.2.3", OPEN)
BODIES = {one.path: one.body for one in OPERATIONS if one.body is not None}


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def body_schema(path: str) -> dict[str, Any]:
    return dict(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def answer_schema(path: str, method: str, status: int, key: str = "schema", kind: str = "application/json") -> Any:
    return DOCUMENT["paths"][path][method]["responses"][str(status)]["content"][kind][key]


def is_valid(path: str, body: Any) -> bool:
    return bool(validator(body_schema(path)).is_valid(body))


def hello() -> ScriptedClient:
    return ScriptedClient([scheduled()], tokens("hi"), [finished()])


# --- the document ---------------------------------------------------------------------------------------------------


def test_every_route_of_the_app_is_declared_and_nothing_else() -> None:
    app = app_for(ScriptedClient())
    assert isinstance(app, Starlette)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes)
    served = {(method.lower(), route.path_format) for route in routes for method in route.methods or ()}
    declared = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert declared == {one for one in served if one[0] != "head"}
    assert len(declared) == len(OPERATIONS)


@pytest.mark.parametrize("access", [OPEN, GUARDED], ids=["open", "guarded"])
def test_the_document_is_valid_openapi_and_each_schema_valid_json_schema(access: Access) -> None:
    document = openapi_document("1.2.3", access)
    read = OpenAPI.model_validate(document)
    assert read.openapi.startswith("3.1.")
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_to_a_schema_and_every_schema_is_referred_to() -> None:
    guarded = openapi_document("1.2.3", GUARDED)
    found = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(guarded)))
    assert found == set(guarded["components"]["schemas"])


def test_fields_are_described_and_nothing_of_the_inside_is() -> None:
    fields = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["top_k"]["description"] == "0 and -1 keep all tokens."
    assert "serve_app" not in json.dumps(DOCUMENT)


def test_every_parameter_of_a_path_is_declared() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            in_path = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)


def test_security_is_declared_where_keys_are_needed_and_only_there() -> None:
    assert "securitySchemes" not in DOCUMENT["components"]
    assert "security" not in json.dumps(DOCUMENT["paths"])
    guarded = openapi_document("1.2.3", GUARDED)
    schemes = guarded["components"]["securitySchemes"]
    assert [schemes[name]["type"] for name in ("apiKey", "apiKeyHeader", "adminKey", "adminKeyHeader")] == [
        "http",
        "apiKey",
    ] * 2
    for one in OPERATIONS:
        told = guarded["paths"][one.path][one.method]
        assert ("security" in told) is ("401" in told["responses"]) is (one.needs != "nothing"), one.path
        for named in told.get("security", ()):
            assert set(named) <= set(schemes)


def test_closed_admin_routes_are_declared_as_the_403_that_they_are() -> None:
    for one in OPERATIONS:
        responses = DOCUMENT["paths"][one.path][one.method]["responses"]
        assert (list(responses) == ["403"]) is (one.needs == "admin key"), one.path
        assert one.needs == "admin key" or not one.path.startswith("/admin/")


def test_every_status_of_the_engines_errors_is_declared_where_it_occurs() -> None:
    of_a_load = ErrorCode.ADAPTER_WITHDRAWN
    of_answers = {rule.status for code, rule in ENGINE_RULES.items() if code is not of_a_load}
    for path in ("/v1/chat/completions", "/v1/completions"):
        declared = {int(status) for status in DOCUMENT["paths"][path]["post"]["responses"]}
        assert of_answers <= declared
    (load,) = [one for one in OPERATIONS if one.path == "/v1/load_lora_adapter"]
    assert ENGINE_RULES[of_a_load].status in load.errors


def test_every_answer_of_a_route_that_takes_hints_declares_their_header_and_no_other() -> None:
    """Such a route has the middleware that writes the header."""
    app = app_for(ScriptedClient())
    assert isinstance(app, Starlette)
    telling = {
        route.path_format
        for route in app.routes
        if isinstance(route, Route) and TellsHints in _middleware_of(route.app)
    }
    assert {one.path for one in OPERATIONS if one.tells_hints} == telling
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                assert (HINTS_HEADER in response.get("headers", {})) is (path in telling), (path, status)


def _middleware_of(app: Any) -> list[type]:
    """Yield the classes around a route's endpoint, each of which holds the next."""
    found = []
    while app is not None:
        found.append(type(app))
        app = getattr(app, "app", None) or getattr(app, "_app", None)
    return found


# --- bodies ---------------------------------------------------------------------------------------------------------

NAMED = {"name": "a", "schema": {"type": "object"}, "strict": True}
TAGS = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True}}]
MESSAGE = CHAT | {"max_tokens": 5}
RESPOND = {"model": MODEL.id, "input": "hi"}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"temperature": 0, "top_p": 1, "stop": ["a", "b"], "max_tokens": 5, "seed": -1}),
    ("/v1/chat/completions", CHAT | {"temperature": None, "stop": None, "stream_options": None}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "text"}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "structural_tag", **TAGS}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": "{}"}}),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": TOOLS[0] | {"function": {"name": "f"}}}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": []}], "stop": ""}),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "high", "reasoning": {"exclude": True}}),
    ("/v1/completions", PROMPT),
    ("/v1/completions", PROMPT | {"regex": "a+"}),
    ("/v1/completions", PROMPT | {"prompt": [1, 2], "echo": True, "logprobs": 20, "max_tokens": 0}),
    ("/v1/responses", RESPOND),
    ("/v1/responses", RESPOND | {"input": [{"role": "user", "content": "a"}], "text": {}, "store": True}),
    ("/v1/responses", RESPOND | {"previous_response_id": "r"}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", MESSAGE | {"temperature": 1, "stop_sequences": ["a"], "system": [{"type": "text", "text": "a"}]}),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "stream": True}),
    ("/v1/messages/count_tokens", CHAT),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
    ("/tokenize", CHAT | {"add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/detokenize", {"model": None, "tokens": []}),
    ("/admin/abort", {"request_id": "r"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
    ("/v1/load_lora_adapter", {"lora_name": "org/a-1.b", "lora_path": "/a", "load_inplace": True}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
]
BAD: list[tuple[str, Any]] = [
    *((path, {}) for path in BODIES),
    *((path, []) for path in BODIES),
    *((path, body | {"colour": 1}) for path, body in GOOD),
    ("/v1/chat/completions", CHAT | {"messages": []}),
    ("/v1/chat/completions", CHAT | {"messages": "a"}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "alien", "content": "a"}]}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", CHAT | {"model": None}),
    ("/v1/chat/completions", CHAT | {"temperature": 2.5}),
    ("/v1/chat/completions", CHAT | {"temperature": "1"}),
    ("/v1/chat/completions", CHAT | {"temperature": True}),
    ("/v1/chat/completions", CHAT | {"top_p": 0}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 0}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 1.5}),
    ("/v1/chat/completions", CHAT | {"stop": ["a"] * 65}),
    ("/v1/chat/completions", CHAT | {"seed": 2**63}),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "hard"}),
    ("/v1/chat/completions", CHAT | {"guided_json": {}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema"}}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"choice": []}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"colour": 1}}),
    ("/v1/chat/completions", CHAT | {"regex": ""}),
    ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "function"}}),
    ("/v1/chat/completions", CHAT | {"stream": "yes"}),
    ("/v1/completions", PROMPT | {"prompt": None}),
    ("/v1/completions", PROMPT | {"prompt": [-1]}),
    ("/v1/completions", PROMPT | {"logprobs": 21}),
    ("/v1/completions", PROMPT | {"suffix": "x"}),
    ("/v1/responses", CHAT),
    ("/v1/responses", RESPOND | {"input": []}),
    ("/v1/responses", RESPOND | {"input": [{"type": "item_reference"}]}),
    ("/v1/responses", RESPOND | {"tool_choice": "any"}),
    ("/v1/responses", RESPOND | {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("/v1/responses", RESPOND | {"previous_response_id": 1}),
    ("/v1/responses", RESPOND | {"conversation": "c"}),
    ("/v1/messages", CHAT),
    ("/v1/messages", MESSAGE | {"temperature": 1.5}),
    ("/v1/messages", MESSAGE | {"messages": [{"role": "developer", "content": "a"}]}),
    ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "one"}}),
    ("/v1/messages", MESSAGE | {"output_format": {"type": "json_schema"}}),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 1000}}),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}),
    ("/tokenize", {"messages": []}),
    ("/detokenize", {"tokens": "a"}),
    ("/detokenize", {"tokens": [-1]}),
    ("/admin/abort", {"request_id": ""}),
    ("/v1/load_lora_adapter", {"lora_name": "base:a", "lora_path": "/a"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": ""}),
    ("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 1}),
    ("/admin/abort", {"request_id": 1}),
]


def is_taken(path: str, body: Any) -> bool:
    try:
        parse_request(BODIES[path], json.dumps(body).encode())
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(("path", "body"), GOOD, ids=str)
def test_a_body_that_the_server_takes_is_valid_by_the_document(path: str, body: Any) -> None:
    assert is_taken(path, body)
    validator(body_schema(path)).validate(body)


@pytest.mark.parametrize(("path", "body"), BAD, ids=str)
def test_a_body_that_the_server_refuses_is_invalid_by_the_document(path: str, body: Any) -> None:
    assert not is_taken(path, body)
    assert not is_valid(path, body)


def test_fields_that_the_server_does_not_support_are_not_in_the_document_even_where_they_would_change_nothing() -> None:
    neutral = CHAT | {"functions": []}
    assert is_taken("/v1/chat/completions", neutral)
    assert not is_valid("/v1/chat/completions", neutral)


def test_the_first_requests_of_the_docs_are_valid_by_the_document() -> None:
    (curl,) = re.findall(r"curl http\S+?(/v1/\S+) .*? -d '(.*?)'\n```", FIRST_SERVER, re.DOTALL)
    path, body = curl
    validator(body_schema(path)).validate(json.loads(body))
    (code,) = re.findall(r"```python\n(from openai.*?)```", FIRST_SERVER, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (create,) = [call for call in calls if ast.unparse(call.func) == "client.chat.completions.create"]
    fields = {word.arg: ast.literal_eval(word.value) for word in create.keywords}
    validator(body_schema("/v1/chat/completions")).validate(fields)


# --- answers --------------------------------------------------------------------------------------------------------


def holds(answer: Answer, path: str, method: str = "post") -> None:
    validator(answer_schema(path, method, answer.status)).validate(answer.json)


@pytest.mark.anyio
async def test_real_answers_are_valid_by_the_document() -> None:
    holds(await chat(hello()), "/v1/chat/completions")
    holds(await complete(hello(), logprobs=1), "/v1/completions")
    holds(await post(app_for(hello()), "/v1/responses", RESPOND), "/v1/responses")
    holds(await post(app_for(hello()), "/v1/messages", MESSAGE), "/v1/messages")
    holds(await post(app_for(hello()), "/v1/messages/count_tokens", CHAT), "/v1/messages/count_tokens")
    for path in ("/v1/models", "/load", "/activity", "/tokenizer_info", "/version"):
        holds(await get(hello(), path), path, "get")
    holds(await get(hello(), f"/v1/models/{MODEL.id}"), "/v1/models/{model_id}", "get")
    asked = {"prompt": "a", "return_token_strs": True}
    holds(await post(app_for(hello()), "/tokenize", asked), "/tokenize")
    holds(await post(app_for(hello()), "/detokenize", {"tokens": [1]}), "/detokenize")


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_real_frames_are_valid_by_the_document(path: str) -> None:
    ask = chat if "chat" in path else complete
    answer = await ask(hello(), stream=True, stream_options={"include_usage": True})
    frame = validator(answer_schema(path, "post", 200, "x-event-data", "text/event-stream"))
    assert len(answer.frames) > 2
    for found in answer.frames:
        frame.validate(found)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {}, 400),
        ("/v1/completions", PROMPT | {"model": "other"}, 404),
        ("/v1/completions", PROMPT | {"prompt": "x" * 500}, 400),
        ("/v1/messages", MESSAGE | {"model": "other"}, 404),
        ("/tokenize", b"{" * 9_000_000, 413),
    ],
    ids=["missing", "model", "length", "messages", "size"],
)
async def test_real_refusals_are_valid_by_the_document(path: str, body: Any, status: int) -> None:
    answer = await post(app_for(hello()), path, body)
    assert answer.status == status
    holds(answer, path)


def test_every_finish_reason_of_an_answer_is_declared() -> None:
    spoken = {reason for part in get_args(get_type_hints(Piece)["finish_reason"]) for reason in get_args(part)}
    assert spoken | {"tool_calls"} == set(get_args(FinishReason))  # to which a chat changes `stop`


@pytest.mark.anyio
async def test_the_app_serves_the_document_and_needs_no_key_for_it() -> None:
    app = app_for(ScriptedClient(), keys=KEYS)
    answer = await Exchange(app, "GET", "/openapi.json", headers=()).finish()
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == openapi_document(about.package_version(), GUARDED)


# --- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would fetch, run, link to and show of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "data", "srcset")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.anyio
async def test_the_page_shows_every_operation_parameter_status_and_schema() -> None:
    answer = await get(ScriptedClient(), "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(b"".join(answer.parts).decode())
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in page.text
            assert operation["summary"].replace("`", "") in page.text
            for parameter in operation["parameters"]:
                assert parameter["name"] in page.text
            for response in operation["responses"].values():
                assert response["description"].replace("`", "") in page.text
    assert {f"schema-{name}" for name in DOCUMENT["components"]["schemas"]} <= page.ids
    assert "temperature" in page.text


def test_code_in_the_documents_texts_is_code_on_the_page_and_no_text_is_lost() -> None:
    html = render(DOCUMENT)
    page = Page(html)
    assert "`" not in page.text
    assert "the smaller of it and <code>timeout_ms</code> counts." in html
    shown = " ".join(page.text.split())

    def texts(part: Any) -> list[str]:
        if isinstance(part, dict):
            own = [part["description"]] if isinstance(part.get("description"), str) else []
            return own + [text for value in part.values() for text in texts(value)]
        return [text for value in part for text in texts(value)] if isinstance(part, list) else []

    written = texts(DOCUMENT["components"]["schemas"])
    assert len(written) > 100
    assert [text for text in written if " ".join(text.replace("`", "").split()) not in shown] == []
    assert all(text.count("`") % 2 == 0 for text in texts(DOCUMENT)), "each code in a text has its end"


@pytest.mark.anyio
async def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing() -> None:
    answer = await get(ScriptedClient(), "/docs")
    html = b"".join(answer.parts).decode()
    assert "//" not in html
    assert "@import" not in html
    assert "url(" not in html
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
    inside = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inside <= page.ids
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert inside == {f"schema-{name}" for name in referred}
    assert answer.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_the_document_says_is_text_on_the_page_and_never_markup() -> None:
    evil = json.loads(json.dumps(DOCUMENT))
    evil["info"]["version"] = "<script>alert(1)</script>"
    evil["paths"]["/load"]["get"]["summary"] = "<b onclick='x'>&amp;"
    evil["components"]["schemas"]["Usage"]["properties"]["<i>"] = {"const": "</code><script>"}
    page = Page(render(evil))
    assert not {"script", "b", "i"} & set(page.tags)
    assert "<b onclick='x'>&amp;" in page.text


# --- the version ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_version_is_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "version", lambda name: {"chunkserve": "9.8.7"}[name])
    app = app_for(ScriptedClient())
    assert (await Exchange(app, "GET", "/version", headers=()).finish()).json == {"version": "9.8.7"}
    document = (await Exchange(app, "GET", "/openapi.json", headers=()).finish()).json
    assert document["info"]["version"] == "9.8.7"


def test_a_tree_that_was_not_installed_says_so_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(about, "version", missing)
    assert about.package_version() == "0+unknown"
