"""Owns the contract that any body, however broken, is at most refused: thousands of mutants go to every POST route.
Never checks what a good answer says: an answer to a mutant only has to keep to a status, an envelope and a size."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from engine.build.engine import FAKE_IMAGES, build_engine
from engine.config import EngineConfig, FakeConfig
from serve_app.api.ingress import MAX_BODY_BYTES, create_app
from serve_app.api.openapi.document import Access, openapi_document
from serve_app.api.openapi.operations import OPERATIONS, UNVERSIONED
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.grammars.check import find_fault
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from tests.serve_app.harness import CHAT, MODEL, PROMPT, Answer, Exchange, LocalClient
from tests.support.image_files import data_url, make_image
from tests.support.json_mutants import mutant
from tests.support.seeds import VARIABLE, run_seed, seeded_random

pytestmark = pytest.mark.anyio

MUTANTS = int(os.environ.get("FUZZ_MUTANTS", "6000"))
"""Mutants over all routes; those that generate get most of them."""
WARM_UP = 200
PANICS = "start: %json " + json.dumps({"required": [{"\U0001f511" * 60: 1}]}, ensure_ascii=False)
"""A schema on which llguidance 1.9.1 panics; see tests/serve_app/grammars/test_json_schema.py."""
MAX_GROWTH_BYTES = 64 * 2**20
"""The growth of the process from the warm-up to the end of a route: less than a tenth of what its mutants weigh."""
MAX_MESSAGE_BYTES = 2000

ADMIN_KEY = "x"
HEADERS = (("content-type", "application/json"), ("x-api-key", ADMIN_KEY))
DOCUMENT = openapi_document("1", Access(keys=False, admin=True))
INSIDE = re.compile(r"/\w+/\w+|\.py\b|Traceback|Value error|serve_app|pydantic|\b(?!NaN)[A-Z][a-z]+[A-Z]\w*")
"""Paths of files, and names of classes."""

LARK = 'start: "a"+ b? | (INT WS)~2\nb: /[b-d]x*/\n%import common (INT, WS)'
WEATHER = {
    "name": "weather",
    "description": "Says how it is",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content or [] %}{{ p.text or '<|image|>' }}{% endfor %}{% endif %}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
URL = data_url(make_image(1, 40, 30))
PICTURE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
TEXT = {"type": "text", "text": "How is it?"}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
SAMPLING = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 2, "max_tokens": 4, "min_tokens": 1},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"65": 1.5}},
    **{"stop": ["zz", "yy"], "stop_token_ids": [3], "bad_words": ["no"], "ignore_eos": False, "priority": 1},
    **{"return_token_ids": True, "skip_special_tokens": True, "truncate_prompt_tokens": 50, "cache_salt": "s"},
    **{"prompt_cache_key": "k", "user": "u", "metadata": {"a": "b"}, "timeout_ms": 60_000},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 5}, "b": {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2}},
}
STRICT = {"type": "function", "function": WEATHER | {"strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TAGS = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ANTHROPIC = CHAT | {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
    ],
}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        CHAT | SAMPLING | {"logprobs": True, "top_logprobs": 2},
        CHAT | STREAMED | {"max_completion_tokens": 3},
        CHAT
        | {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "auto", "parallel_tool_calls": False}
        | {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "How is it?", "name": "ann"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
                {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
            ]
        },
        CHAT | {"documents": [{"title": "a"}], "chat_template_kwargs": {"enable_thinking": False}},
        CHAT | {"response_format": FORMAT, "tools": [STRICT], "max_tokens": 9},
        CHAT | {"response_format": TAGS, "max_tokens": 9},
        CHAT
        | {"tools": [STRICT, {"type": "function", "function": {"name": "f"}}], "tool_choice": NAMED, "max_tokens": 9},
        CHAT | {"tools": [STRICT], "tool_choice": ALLOWED, "max_tokens": 9},
        CHAT | {"continue_final_message": True, "prompt_logprobs": 1, "include_reasoning": False},
        {"model": MODEL.id, "max_tokens": 3, "messages": [{"role": "user", "content": [PICTURE, TEXT, PICTURE]}]},
    ],
    "/v1/embeddings": [
        {"model": MODEL.id, "input": "a"},
        {"model": MODEL.id, "input": ["a", "b"], "encoding_format": "base64", "priority": 1, "user": "ann"},
        {"model": MODEL.id, "input": [[1, 2], [3]], "truncate_prompt_tokens": 1, "timeout_ms": 5000},
    ],
    "/v1/completions": [
        PROMPT,
        PROMPT | SAMPLING | {"echo": True, "logprobs": 2},
        PROMPT | STREAMED | {"prompt": ["a", "b"]},
        PROMPT | {"structured_outputs": {"json": SCHEMA}, "max_tokens": 9},
        PROMPT | {"structured_outputs": {"choice": ["yes", "no"]}},
        PROMPT | {"structured_outputs": {"grammar": 'root ::= "a" ([b-d] | "e")*'}, "max_tokens": 9},
        PROMPT | {"regex": "[a-c]{2}|(d|e)+", "max_tokens": 9},
        PROMPT | {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True},
        PROMPT | {"prompt": [1, 2, 3], "prompt_logprobs": 0, "allowed_token_ids": [5, 6]},
    ],
    "/v1/responses": [
        {"model": MODEL.id, "input": "hi", "temperature": 0.5, "max_output_tokens": 4, "metadata": {"a": "b"}},
        {
            "model": MODEL.id,
            "input": "hi",
            "max_output_tokens": 9,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "tools": [{"type": "function", **WEATHER, "strict": True}],
            "tool_choice": "auto",
        },
        {
            "model": MODEL.id,
            "instructions": "Be brief.",
            "stream": True,
            "tools": [{"type": "function", **WEATHER}],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}, INPUT_IMAGE]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
        },
        {
            "model": MODEL.id,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"},
            "input": "hi",
            "tool_choice": "none",
            "tools": [
                {"type": "custom", "name": "note", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}},
                {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **WEATHER}]},
                {"type": "shell", "environment": {"type": "local", "skills": []}},
                {"type": "web_search", "filters": {}},
            ],
        },
        {
            "model": MODEL.id,
            "input": [
                {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
                {"type": "custom_tool_call", "call_id": "c", "name": "note", "input": "a"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "kept"},
                {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "a"}]},
                {"type": "mcp_call", "id": "m", "server_label": "s", "name": "t", "arguments": "{}"},
                {"type": "web_search_call", "id": "w", "status": "completed"},
                {"type": "item_reference", "id": "w"},
            ],
        },
    ],
    "/v1/messages": [
        CHAT | {"max_tokens": 4, "temperature": 0.5, "top_k": 5, "stop_sequences": ["zz"], "stream": True},
        ANTHROPIC | {"max_tokens": 4, "thinking": {"type": "adaptive"}},
        ANTHROPIC | {"max_tokens": 9, "tool_choice": {"type": "tool", "name": "weather"}},
        CHAT | {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    "/v1/messages/count_tokens": [
        CHAT,
        ANTHROPIC,
        {"model": MODEL.id, "messages": [{"role": "user", "content": [TEXT, BLOCK]}]},
    ],
    "/tokenize": [{"prompt": "hi", "return_token_strs": True}, CHAT | {"add_generation_prompt": False}],
    "/detokenize": [{"model": MODEL.id, "tokens": [72, 105]}],
    "/admin/abort": [{"request_id": "r"}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "/nowhere", "load_inplace": True}],
    "/v1/unload_lora_adapter": [{"lora_name": "a"}],
    **{f"/admin/{name}": [{}] for name in ("drain", "resume", "reset_prefix_cache")},
}
SEEDS |= {f"/v1{path}": SEEDS[path] for path in ("/tokenize", "/detokenize")}
ROUTES = [one for one in OPERATIONS if one not in UNVERSIONED]
"""Routes, without a second one for the same handler, which would cost as much and find the same."""
POSTS = [one.path for one in ROUTES if one.method == "post"]
SHARES = {path: 5 if path in ("/v1/chat/completions", "/v1/completions") else 1 for path in POSTS}
# No request of that name is live, no adapter is there, and none was loaded.
GOOD_STATUS = {"/admin/abort": 404, "/v1/load_lora_adapter": 400, "/v1/unload_lora_adapter": 404}


@pytest.fixture
def app() -> Iterator[ASGIApp]:
    """Make an app with everything that a body can ask for (tools, reasoning,
    documents) over an engine that answers at once."""
    fake = FakeConfig(reply="It rains.", images=True)
    engine = build_engine("", EngineConfig(executor="fake", fake=fake, max_model_len=256, max_loras=2))
    tokenizer = Tokenizer.byte_level(images=True)
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    model = replace(MODEL, max_model_len=256, tool_parser="hermes", reasoning_parser="qwen3", pooling="mean")
    model = replace(model, images=ImageIntake(FAKE_IMAGES, ImageSettings()))
    keys = Keys(admin_sha256=hashlib.sha256(ADMIN_KEY.encode()).hexdigest())
    yield create_app(LocalClient(engine), tokenizer, model, keys=keys, allow_lora_updates=True)
    engine.shutdown()


async def send(app: ASGIApp, path: str, body: bytes) -> Answer:
    return await Exchange(app, "POST", path, body, HEADERS).finish()


def declared(path: str, status: int) -> dict[str, Any]:
    responses: dict[str, Any] = DOCUMENT["paths"][path]["post"]["responses"]
    assert str(status) in responses, f"{status} is not declared"
    return dict(responses[str(status)])


VALIDATORS = {
    (path, status): Draft202012Validator(
        {**told["content"]["application/json"]["schema"], "components": DOCUMENT["components"]}
    )
    for path in POSTS
    for status, told in DOCUMENT["paths"][path]["post"]["responses"].items()
    if "application/json" in told["content"]
}


def check(path: str, answer: Answer) -> None:
    declared(path, answer.status)
    if answer.status == 200:
        return
    error = answer.json["error"]
    # A mutant may well ask for an answer within a millisecond.
    assert answer.status < 500 or error["code"] == "deadline_exceeded"
    VALIDATORS[path, str(answer.status)].validate(answer.json)
    assert len(b"".join(answer.parts)) < MAX_MESSAGE_BYTES
    assert not INSIDE.search(error["message"]), error["message"]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def check_mutant(app: ASGIApp, path: str, body: bytes) -> None:
    try:
        check(path, await send(app, path, body))
    except Exception as error:
        shown = body if len(body) < 3000 else body[:1500] + b" ... " + body[-1500:]
        raise AssertionError(f"{VARIABLE}={run_seed()}: {error!r} for POST {path} {shown!r}") from error


def test_every_post_route_has_bodies_to_mutate() -> None:
    assert set(POSTS) == set(SEEDS)


@pytest.mark.parametrize("path", POSTS)
async def test_thousands_of_broken_bodies_are_refused_in_order_and_leave_nothing_behind(
    app: ASGIApp, path: str
) -> None:
    count = WARM_UP + MUTANTS * SHARES[path] // sum(SHARES.values())
    print(f"{count} mutants")
    rng = seeded_random()
    for _ in range(WARM_UP):
        await check_mutant(app, path, mutant(rng, SEEDS[path]))
    find_fault(PANICS)  # where RUST_BACKTRACE is set, the first panic loads 50 MB of symbols, once
    before = resident_bytes()
    for _ in range(count - WARM_UP):
        await check_mutant(app, path, mutant(rng, SEEDS[path]))
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    for seed in SEEDS[path]:
        answer = await send(app, path, json.dumps(seed).encode())
        assert answer.status == GOOD_STATUS.get(path, 200), answer.json


@pytest.mark.parametrize("path", [one.path for one in ROUTES if one.body is not None])
@pytest.mark.parametrize("size", [MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 10_000_000])
@pytest.mark.parametrize("kind", ["blank", "text", "keys", "nested"])
async def test_a_body_at_the_limit_is_read_and_one_above_it_is_a_413(
    app: ASGIApp, path: str, size: int, kind: str
) -> None:
    body = json.dumps(SEEDS[path][0]).encode()
    match kind:
        case "blank":
            body += b" " * (size - len(body))
        case "text":
            body = body[:-1] + b', "user": "' + b"x" * (size - len(body) - 12) + b'"}'
        case "keys":
            body = (b"{" + b",".join(b'"%d":0' % key for key in range(size // 8))).ljust(size)[: size - 1] + b"}"
        case _:
            body = b'{"model":' * (size // 9) + b" " * (size % 9)
    assert len(body) == size
    answer = await send(app, path, body)
    check(path, answer)
    limit = 4096 if path in GOOD_STATUS else MAX_BODY_BYTES
    assert (answer.status == 413) is (size > limit)
    assert kind != "blank" or size > limit or answer.status == 200
