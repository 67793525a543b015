"""Owns the contract of the OpenAI routes as clients see it: each field and each refusal, through `serve run`.
Never tests a field's effect: tests/serve_app/api does, without a server."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image

from loadtest.server import Server
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import ChatRequest, CompletionRequest
from tests.support.image_files import data_url
from tests.support.serve_process import serve_run

pytestmark = pytest.mark.server

MODEL = "smollm2-135m-instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PROMPT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
TEXT = {"model": MODEL, "input": "hi"}
LONG = PROMPT | {"max_tokens": 2000, "ignore_eos": True}
CONTEXT, BODY, STEP_MS = 3000, 100_000, 5
NUM_IMAGES, IMAGE_TOKENS = 40, 64
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT, "/v1/embeddings": TEXT}

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FIELDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "model": (MODEL, 7, {}),
    "messages": ([{"role": "user", "content": "hello"}], [], {}),
    "prompt": ([[1, 2], [3]], 1.5, {}),
    "input": (["a", "b"], {}, {}),
    "max_tokens": (3, 0, {}),
    "max_completion_tokens": (3, 0, {}),
    "temperature": (0.5, 2.5, {}),
    "top_p": (0.5, 0, {}),
    "top_k": (5, -2, {}),
    "min_p": (0.1, 2, {}),
    "seed": (7, 2**70, {}),
    "stop": (["x", "y"], ["a"] * 65, {}),
    "stop_token_ids": ([1], [-1], {}),
    "min_tokens": (2, -1, {}),
    "ignore_eos": (True, 1, {}),
    "n": (2, 0, {}),
    "presence_penalty": (1.0, 3, {}),
    "frequency_penalty": (1.0, -3, {}),
    "repetition_penalty": (1.1, 0, {}),
    "repeat_penalty": (1.1, 0, {}),
    "logit_bias": ({"97": 5}, {"abc": 1}, {}),
    "bad_words": (["x"], [""], {}),
    "allowed_token_ids": ([97, 98], [], {}),
    "include_stop_str_in_output": (True, "yes", {}),
    "skip_special_tokens": (False, 0, {}),
    "prompt_logprobs": (1, 21, {}),
    "return_token_ids": (True, "true", {}),
    "return_tokens_as_token_ids": (True, "true", {}),
    "truncate_prompt_tokens": (1, -2, {}),
    "cache_salt": ("a", "", {}),
    "priority": (-1, 1.5, {}),
    "response_format": ({"type": "json_object"}, {"type": "xml"}, {"max_tokens": 500}),
    "structured_outputs": ({"choice": ["yes", "no"]}, {"choice": []}, {}),
    "json_schema": (json.dumps(SCHEMA), "{", {"max_tokens": 50}),
    "regex": ("[ab]{2}", "(", {}),
    "ebnf": ('root ::= "a"', "root ::= (", {}),
    "timeout_ms": (60_000, 0, {}),
    "slo_tpot_ms": (60_000, 0, {}),
    "slo_ttft_ms": (60_000, 0, {}),
    "stream": (False, "no", {}),
    "stream_options": ({"include_usage": True}, {"include_usage": 1}, {"stream": True}),
    "usage": ({"include": True}, {"include": 1}, {}),
    "provider": ({"order": ["a"]}, {"zdr": True}, {}),
    "prompt_cache_key": ("a", 5, {}),
    "user": ("ann", 5, {}),
    "metadata": ({"a": "b"}, "a", {}),
    "safety_identifier": ("a", 5, {}),
    "tools": ([FUNCTION], [{"type": "function"}], {}),
    "tool_choice": ("required", "sometimes", {"tools": [FUNCTION], "max_tokens": 300}),
    "parallel_tool_calls": (False, "no", {"tools": [FUNCTION]}),
    "include_reasoning": (False, "no", {}),
    "reasoning_effort": ("high", "hard", {}),
    "enable_thinking": (True, "yes", {}),
    "thinking_budget": (1024, "long", {}),
    "reasoning": ({"effort": "low"}, {"effort": "hard"}, {}),
    "thinking": ({"type": "enabled"}, {"type": "hard"}, {}),
    "chat_template_kwargs": ({}, {"unheard_of": 1}, {}),
    "documents": ([], "a", {}),
    "add_generation_prompt": (True, "yes", {}),
    "continue_final_message": (False, "no", {}),
    "logprobs": (True, "yes", {}),
    "top_logprobs": (2, 21, {"logprobs": True}),
    "echo": (True, "yes", {}),
    "encoding_format": ("base64", "hex", {}),
}
"""Values that are accepted and values that are refused, and what has to be sent beside them."""
IN_COMPLETIONS = {"max_tokens": (3, -1, {}), "logprobs": (2, 21, {})}
REFUSED = {
    "/v1/chat/completions": {"guided_json": {}, "use_beam_search": True, "modalities": ["audio"], "unheard_of": 1},
    "/v1/completions": {"suffix": "x", "best_of": 2, "guided_regex": "a", "unheard_of": 1},
    "/v1/embeddings": {"dimensions": 2, "temperature": 1.0},
}
KEYS = {name: f"key of {name}" for name in ("ann", "bob")}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys: list[dict[str, Any]] = [
        {"tenant": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in KEYS.items()
    ]
    keys[1]["max_concurrent_requests"] = 1
    settings = {
        "engine": {"executor": "fake", "max_model_len": CONTEXT, "fake": {"step_delay_ms": STEP_MS, "images": True}},
        "served_model_name": [MODEL, "tiny"],
        "model_aliases": {"claude-*": MODEL, "gpt-4o": "tiny"},
        "pooling": "mean",
        "images": {"max_per_request": NUM_IMAGES},
        "max_body_bytes": BODY,
        "auth": {"keys": keys, "admin_sha256": hashlib.sha256(b"admin").hexdigest()},
        "admission": {"max_concurrent_requests": 4},
    }
    with serve_run(settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS['ann']}"}, timeout=60) as client:
        yield client


def test_a_request_may_have_more_pixels_than_one_message_of_serves_calls(client: httpx.Client) -> None:
    """Calls by value fail beyond 4 MiB; these pixels are 6 MiB."""
    urls = [data_url(Image.new("RGB", (224, 224), (number, 0, 0))) for number in range(NUM_IMAGES)]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    asked = CHAT | {"messages": [{"role": "user", "content": content}]}
    told = client.post("/v1/chat/completions", json=asked)
    assert told.status_code == 200, told.text
    assert told.json()["usage"]["prompt_tokens"] - NUM_IMAGES * IMAGE_TOKENS in range(2, 5)


def fields_of(path: str) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    model = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}.get(path, EmbeddingRequest)
    own = IN_COMPLETIONS if path == "/v1/completions" else {}
    return {name: (FIELDS | own)[name] for name in model.model_fields}


CASES = [(path, name) for path in PATHS for name in fields_of(path)]


@pytest.mark.parametrize(("path", "name"), CASES, ids=lambda value: str(value).rpartition("/")[2])
def test_a_field_is_taken_and_a_wrong_value_is_a_400_that_names_it(client: httpx.Client, path: str, name: str) -> None:
    good, bad, beside = fields_of(path)[name]
    taken = client.post(path, json=PATHS[path] | beside | {name: good})
    assert taken.status_code == 200, taken.text
    refused = client.post(path, json=PATHS[path] | beside | {name: bad})
    error = refused.json()["error"]
    assert refused.status_code == 400, refused.text
    assert str(error["param"]).partition(".")[0] == name, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], type(error["code"])) == ("invalid_request_error", str)


@pytest.mark.parametrize("name", ["tiny", "claude-sonnet-4-5", "gpt-4o"])
def test_a_models_other_names_and_aliases_are_answered_by_it(client: httpx.Client, name: str) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | {"model": name})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL), answer.text
    listed = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert listed == [MODEL, "tiny", "gpt-4o"]


def test_what_had_no_effect_is_named_beside_the_answer(client: httpx.Client) -> None:
    fields = {"verbosity": "high", "reasoning_effort": "high", "max_tokens": 10 * CONTEXT, "stop": ["a", "b", "T"]}
    answer = client.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-chunkserve-ignored"] == "verbosity, reasoning_effort, max_tokens"


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, fields in REFUSED.items() for name in fields])
def test_a_field_that_is_not_supported_is_a_400_that_names_it(client: httpx.Client, path: str, name: str) -> None:
    answer = client.post(path, json=PATHS[path] | {name: REFUSED[path][name]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind", "code"),
    [
        (b"{", {}, 400, "invalid_request_error", "invalid_json"),
        (b"[]", {}, 400, "invalid_request_error", "invalid_value"),
        ({"model": MODEL}, {}, 400, "invalid_request_error", "missing_required_parameter"),
        (PROMPT | {"prompt": "x" * CONTEXT}, {}, 400, "invalid_request_error", "context_length_exceeded"),
        (PROMPT | {"model": "y"}, {}, 404, "invalid_request_error", "model_not_found"),
        (PROMPT, {"Content-Type": "text/plain"}, 415, "invalid_request_error", "unsupported_media_type"),
        (PROMPT | {"user": "x" * BODY}, {}, 413, "request_too_large", "body_too_large"),
        (PROMPT, {"Authorization": "Bearer other"}, 401, "authentication_error", "invalid_api_key"),
        (LONG, {"Request-Timeout-Ms": "100"}, 504, "timeout", "deadline_exceeded"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_refusal_has_its_status_type_and_code(
    client: httpx.Client, body: Any, headers: dict[str, str], status: int, kind: str, code: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"} | headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code), answer.text
    assert error.keys() >= {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    expected = {401: ("www-authenticate", "Bearer"), 504: ("x-should-retry", "false")}.get(status)
    assert expected is None or answer.headers[expected[0]] == expected[1]
    if code == "context_length_exceeded":
        assert "maximum context length" in error["message"]
    if code == "model_not_found":
        assert "does not exist" in error["message"]
        assert "Could not find" in error["message"]
    assert client.post("/v1/completions", json=PROMPT).status_code == 200, "and the connection serves on"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404)])
def test_what_no_route_takes_has_the_same_envelope(client: httpx.Client, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_stream_that_is_late_ends_with_an_error_frame(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "timeout_ms": 1500}) as answer:
        payloads = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200
    assert payloads[-1] == "[DONE]"
    assert json.loads(payloads[-2])["error"]["code"] == "deadline_exceeded"


def wait_for(client: httpx.Client, num_running: int) -> None:
    deadline = time.monotonic() + 20
    while sum(engine["num_running"] for engine in client.get("/load").json()["engines"]) != num_running:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("key", "others", "status", "code"), [("bob", 1, 429, "rate_limit_exceeded"), ("ann", 4, 503, "queue_full")]
)
def test_a_request_over_a_limit_is_told_when_to_come_back(
    server: Server, client: httpx.Client, key: str, others: int, status: int, code: str
) -> None:
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    body = LONG | {"stream": True}
    with ThreadPoolExecutor(others) as pool, httpx.Client(base_url=server.url, headers=headers, timeout=60) as ours:
        streams = [ours.stream("POST", "/v1/completions", json=body) for _ in range(others)]
        opened = list(pool.map(lambda stream: stream.__enter__(), streams))
        try:
            wait_for(client, others)
            answer = ours.post("/v1/completions", json=PROMPT)
        finally:
            for stream in opened:
                stream.close()
        wait_for(client, 0)
        assert ours.post("/v1/completions", json=PROMPT).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert int(answer.headers["retry-after-ms"]) > 0
    assert (answer.headers.get("x-ratelimit-limit-requests") == "1") is (status == 429)


def test_a_deployment_that_drains_refuses_and_goes_on_when_it_is_told(client: httpx.Client) -> None:
    admin = {"Authorization": "Bearer admin"}
    assert client.post("/admin/drain", headers=admin).status_code == 200
    try:
        answer = client.post("/v1/completions", json=PROMPT)
    finally:
        assert client.post("/admin/resume", headers=admin).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert answer.headers["retry-after"]
    assert client.post("/v1/completions", json=PROMPT).status_code == 200
