"""Owns the contract of structured output over HTTP: answers fit, or the request is a 400. Long:
each field, API and refusal.
Never tests the text that a grammar allows: tests/serve_app/grammars and parsing do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import openai
import pydantic
import pytest
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig, SchedulerConfig
from engine.protocol import ErrorCode, RequestRejected
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.api.generation.test_tools import TEMPLATE, app_of, saying, together
from tests.serve_app.api.test_end_to_end import openai_client
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Answer,
    LocalClient,
    ScriptedClient,
    joined_choice,
    post,
    said,
)
from tests.support.json_schemas import random_schema

pytestmark = pytest.mark.anyio

CALLER = replace(MODEL, max_model_len=8000, tool_parser="hermes")
THINKER = replace(CALLER, reasoning_parser="qwen3")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TAGGED = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
BAD_FORMAT = {"type": "json_object", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}
BAD = {"type": "object", "properties": {"a": {"not": {}}}}
LIMITS = {"max_tokens": 3000, "seed": 7}


def tool(name: str, schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


TOOLS = [tool("weather"), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]
VALIDATORS = {one["function"]["name"]: Draft202012Validator(one["function"]["parameters"]) for one in TOOLS}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    made = build_engine("", EngineConfig(executor="fake", max_model_len=8000))
    yield made
    made.shutdown()


def serving(engine: AsyncEngine, model: ServedModel = CALLER) -> ASGIApp:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    return create_app(LocalClient(engine), tokenizer, model)


async def choice_of(app: ASGIApp, **fields: Any) -> dict[str, Any]:
    """Return the choice of a whole answer; a stream with the same seed gives the same."""
    body = CHAT | LIMITS | fields
    whole = await post(app, "/v1/chat/completions", body)
    assert whole.status == 200, whole.json
    (choice,) = whole.json["choices"]
    streamed = await post(app, "/v1/chat/completions", body | {"stream": True})
    message, reason = together(streamed)
    for call in [*message.get("tool_calls", ()), *choice["message"].get("tool_calls", ())]:
        call.pop("id", None)
    assert message == said(choice["message"])
    assert reason == choice["finish_reason"]
    return dict(choice)


async def text_of(app: ASGIApp, **fields: Any) -> str:
    choice = await choice_of(app, **fields)
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


# --- what the text is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"json_schema": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": json.dumps(SCHEMA)}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},  # of Hugging Face's InferenceClient
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_schema_by_any_name_gives_json_that_it_allows(engine: AsyncEngine, fields: dict[str, Any]) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(await text_of(serving(engine), **fields)))


async def test_two_hundred_random_schemas_are_kept_whole_and_streamed_in_chunks_and_after_preemptions() -> None:
    """Sixteen requests run at a time, with memory for a third of what they come to hold.
    Every second answer is a stream."""
    scheduler = SchedulerConfig(reserve_mode="prompt")
    tight = EngineConfig(
        executor="fake",
        max_model_len=1000,
        num_kv_blocks=64,
        max_num_seqs=16,
        max_num_batched_tokens=100,
        max_prefill_tokens=20,
        scheduler=scheduler,
    )
    engine = build_engine("", tight)
    app, turn = serving(engine), asyncio.Semaphore(16)

    async def reply(seed: int) -> bool:
        schema = random_schema(seed, depth=2)
        body = (
            PROMPT
            | LIMITS
            | {"prompt": "x" * 50, "seed": seed, "max_tokens": 900, "structured_outputs": {"json": schema}}
        )
        async with turn:
            answer = await post(app, "/v1/completions", body | {"stream": seed % 2 == 1})
        assert answer.status == 200, answer.json
        choice = joined_choice(answer) if seed % 2 else answer.json["choices"][0]
        if choice["finish_reason"] == "stop":
            Draft202012Validator(schema).validate(json.loads(choice["text"]))
        return bool(choice["finish_reason"] == "stop")

    try:
        ended = await asyncio.gather(*map(reply, range(200)))
        assert engine.load().num_preemptions > 0
        assert sum(ended) >= 190, "the others were cut off at max_tokens"
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": r"\d{3}-[a-z]{2}"}}, r"\d{3}-[a-z]{2}"),
        ({"regex": "(yes|no){2}"}, "(yes|no){2}"),
        ({"structured_outputs": {"choice": ["red", "dark green"]}}, "red|dark green"),
        ({"structured_outputs": {"grammar": 'start: "a" /b{2,3}/'}}, "ab{2,3}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [bc]'}}, "a[bc]"),
        ({"ebnf": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_the_text_is_what_was_asked_for(engine: AsyncEngine, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, await text_of(serving(engine), **fields), re.DOTALL)
    answer = await post(serving(engine), "/v1/completions", PROMPT | LIMITS | fields)
    assert re.fullmatch(pattern, answer.json["choices"][0]["text"], re.DOTALL)


async def test_each_choice_of_an_answer_keeps_to_it(engine: AsyncEngine) -> None:
    answer = await post(serving(engine), "/v1/chat/completions", CHAT | LIMITS | {"regex": "[a-z]{4}", "n": 3})
    texts = [choice["message"]["content"] for choice in answer.json["choices"]]
    assert len(texts) == 3
    assert all(re.fullmatch("[a-z]{4}", text) for text in texts)


async def submitted(model: ServedModel = CALLER, **fields: Any) -> str | None:
    """Return the grammar that an engine is sent."""
    client = saying("x")
    answer = await post(app_of(client, model), "/v1/chat/completions", CHAT | fields)
    assert answer.status == 200, answer.json
    return client.submissions[0].sampling.grammar


@pytest.mark.parametrize("where", [{"response_format": TAGGED}, {"structured_outputs": {"structural_tag": TAGGED}}])
async def test_structural_tags_reach_the_engine(where: dict[str, Any]) -> None:
    grammar = await submitted(**where) or ""
    assert "head_0" in grammar
    assert '\\"a>\\"' in grammar


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [tool("weather", strict=True)], "tool_choice": "none"},
    ],
    ids=str,
)
async def test_an_answer_that_nothing_constrains_has_no_grammar(fields: dict[str, Any]) -> None:
    assert await submitted(**fields) is None


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "pythonic", "mistral"])
async def test_a_required_call_is_made_and_ends_the_answer_as_calls_do(engine: AsyncEngine, family: str) -> None:
    app = serving(engine, replace(CALLER, tool_parser=family))
    for seed in range(6):
        choice = await choice_of(app, tools=TOOLS, tool_choice="required", seed=seed)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            VALIDATORS[call["function"]["name"]].validate(json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("name", ["weather", "now"])
async def test_a_named_call_is_made_once_and_is_no_reason_to_stop(engine: AsyncEngine, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    choice = await choice_of(serving(engine), tools=TOOLS, tool_choice=named)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == (name, "stop")


async def test_without_parallel_calls_there_is_one(engine: AsyncEngine) -> None:
    for seed in range(6):
        fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        choice = await choice_of(serving(engine), **fields)
        assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("mode", ["required", "auto"])
async def test_only_allowed_tools_can_be_called(engine: AsyncEngine, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    fields = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    grammar = await submitted(**fields) or ""
    assert "now" in grammar
    assert "weather" not in grammar
    if mode == "required":
        choice = await choice_of(serving(engine), **fields)
        assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"now"}


async def test_a_strict_tool_is_constrained_where_the_model_calls_it_and_the_template_does_not_see_the_word() -> None:
    client = saying("x")
    await post(app_of(client, CALLER), "/v1/chat/completions", CHAT | {"tools": [tool("weather", strict=True)]})
    (submission,) = client.submissions
    assert "head_0" in (submission.sampling.grammar or "")
    assert "strict" not in bytes(submission.prompt_token_ids).decode()


async def test_a_format_beside_tools_leaves_the_model_the_choice_between_both() -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    grammar = json.loads(await submitted(tools=TOOLS, response_format=format_) or "")
    assert grammar["grammars"][0]["lark_grammar"] == "start: @one | @two"
    assert [entry["name"] for entry in grammar["grammars"]] == ["start", "one", "two"]


@pytest.mark.parametrize("format_", [{"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}], ids=str)
async def test_a_format_beside_calls_that_must_be_made_has_no_text_to_apply_to(
    engine: AsyncEngine, format_: dict[str, Any]
) -> None:
    """As with OpenAI and vLLM the calls win, and there is no text for the format. It has to be valid all the same."""
    fields = {"tools": TOOLS, "tool_choice": "required", "response_format": format_}
    assert await submitted(**fields) == await submitted(tools=TOOLS, tool_choice="required")
    choice = await choice_of(serving(engine), **fields)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    for call in choice["message"]["tool_calls"]:
        VALIDATORS[call["function"]["name"]].validate(json.loads(call["function"]["arguments"]))
    bad = await post(serving(engine), "/v1/chat/completions", CHAT | fields | {"response_format": BAD_FORMAT})
    assert (bad.status, bad.error["param"]) == (400, "response_format.schema")


async def test_thoughts_are_before_the_constrained_answer_and_not_in_a_plain_completion() -> None:
    assert "@answer" in (await submitted(THINKER, regex="a") or "")
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    assert "@answer" not in (await submitted(THINKER, regex="a", **closed) or "")
    client = saying("x")
    await post(app_of(client, THINKER), "/v1/completions", PROMPT | {"regex": "a"})
    assert "@answer" not in (client.submissions[0].sampling.grammar or "")


class Forecast(pydantic.BaseModel):
    """A class of which OpenAI's client makes a strict schema, with references and annotations."""

    class Day(pydantic.BaseModel):
        degrees: int = pydantic.Field(ge=-50, le=50)
        sky: Literal["clear", "cloudy"]
        note: str | None

    days: list[Day] = pydantic.Field(max_length=2)


async def test_openais_client_parses_answers_and_calls_into_its_users_models(engine: AsyncEngine) -> None:
    limits: Any = {"model": MODEL.id, "messages": CHAT["messages"], "max_tokens": 3000, "seed": 3}
    async with openai_client(serving(engine)) as client:
        answer = await client.chat.completions.parse(**limits, response_format=Forecast)
        assert isinstance(answer.choices[0].message.parsed, Forecast)
        function = openai.pydantic_function_tool(Forecast, name="show")
        called = await client.chat.completions.parse(**limits, tools=[function], tool_choice="required")
        calls = called.choices[0].message.tool_calls or []
        assert calls
        assert all(isinstance(call.function.parsed_arguments, Forecast) for call in calls)


# --- the other APIs -------------------------------------------------------------------------------------------------


async def test_responses_have_formats_and_forced_calls_and_repeat_them(engine: AsyncEngine) -> None:
    app, ask = serving(engine), {"model": MODEL.id, "input": "hi", "max_output_tokens": 3000, "temperature": 0}
    format_ = {"type": "json_schema", "name": "a", "schema": SCHEMA, "description": None, "strict": None}
    body = (await post(app, "/v1/responses", ask | {"text": {"format": format_}})).json
    Draft202012Validator(SCHEMA).validate(json.loads(body["output"][0]["content"][0]["text"]))
    assert body["text"]["format"] == format_
    choice = {"type": "function", "name": "weather"}
    functions = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    body = (await post(app, "/v1/responses", ask | {"tools": functions, "tool_choice": choice})).json
    (item,) = body["output"]
    VALIDATORS[item["name"]].validate(json.loads(item["arguments"]))
    assert body["tool_choice"] == choice


@pytest.mark.parametrize(
    ("tool_fields", "strict"),
    [({}, True), ({"strict": False}, False), ({"parameters": BAD}, False), ({"strict": True}, True)],
)
async def test_a_function_of_a_response_is_strict_unless_it_cannot_be_and_the_answer_says_which(
    tool_fields: dict[str, Any], strict: bool
) -> None:
    client = saying("x")
    function = {"type": "function", "name": "weather", "parameters": SCHEMA} | tool_fields
    body = {"model": MODEL.id, "input": "hi", "tools": [function]}
    answer = (await post(app_of(client, CALLER), "/v1/responses", body)).json
    assert answer["tools"][0]["strict"] is strict
    assert (client.submissions[0].sampling.grammar is not None) is strict


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_messages_have_tools_that_must_be_used(engine: AsyncEngine, choice: dict[str, Any]) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = CHAT | {"max_tokens": 3000, "tools": tools, "tool_choice": choice, "temperature": 0}
    answer = (await post(serving(engine), "/v1/messages", body)).json
    assert answer["stop_reason"] == "tool_use"
    for block in answer["content"]:
        assert block["type"] == "tool_use"
        VALIDATORS["weather"].validate(block["input"])


@pytest.mark.parametrize("name", ["output_format", "output_config"])
async def test_messages_have_a_format(engine: AsyncEngine, name: str) -> None:
    given: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
    given = given if name == "output_format" else {"format": given}
    answer = (await post(serving(engine), "/v1/messages", CHAT | {"max_tokens": 3000, name: given})).json
    Draft202012Validator(SCHEMA).validate(json.loads(answer["content"][0]["text"]))


# --- refusals -------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_object", "schema": BAD}}, "response_format.schema", '"not"'),
    ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema", "dictionary"),
    ({"response_format": {"type": "json_object", "value": BAD}}, "response_format.value", '"not"'),
    ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.value", "same meaning"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}},
        "response_format.json_schema.schema",
        '"not"',
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"description": "x" * 2**16}},
            }
        },
        "response_format.json_schema.schema",
        "at most 65536 bytes, but it has 65555",
    ),
    ({"response_format": TAGGED | {"triggers": ["<g"]}}, "response_format.structures.0.begin", "exactly one"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format", "not supported"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "1024"),
    ({"structured_outputs": {"choice": ["a" * 1001]}}, "structured_outputs.choice.0", "1000"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice.0", "at least 1"),
    ({"structured_outputs": {"grammar": "root: a"}}, "structured_outputs.grammar", "should be a grammar"),
    ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"json": r'{"title": "\ud800"}'}}, "structured_outputs.json", "surrogate"),
    ({"json_schema": '{"minimum": NaN}'}, "json_schema", ""),
    ({"json_schema": '{"multipleOf": ' + "9" * 310 + "}"}, "json_schema", "should be at most 65536"),
    ({"ebnf": r'start: %json {"const": "\ud800"}'}, "ebnf", "surrogate"),
    (
        {"structured_outputs": {"grammar": r'start: %json {"properties": {"\udfff": {}}}'}},
        "structured_outputs.grammar",
        "surrogate",
    ),
    ({"json_schema": '{"maximum": ' + "9" * 5000 + "}"}, "json_schema", "not JSON"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not"),
    ({"regex": "(a"}, "regex", "unclosed"),
    ({"ebnf": 'root ::= "a'}, "ebnf", "GBNF"),
    ({"json_schema": "[]"}, "json_schema", "object"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "together with regex"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "together with response_format"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "together with regex"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "together with tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice", "together with regex"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no'"),
    ({"tool_choice": "required"}, "tool_choice", "there are tools"),
    ({"tools": [tool("f", BAD)], "tool_choice": "required"}, "tools.0.function.parameters", '"not"'),
    ({"tools": [*TOOLS, tool("f", BAD, strict=True)]}, "tools.2.function.parameters", '"not"'),
    ({"tools": [tool("f", {"type": "array"}, strict=True)]}, "tools.0.function.parameters.type", "object"),
    ({"tools": [*TOOLS, *TOOLS], "tool_choice": "required"}, "tools.2.function.name", "two tools"),
    (
        {"tools": [tool(f"f{i}", {"enum": [f"{i}" * 30_000]}) for i in range(10, 30)], "tool_choice": "required"},
        "tool_choice",
        "at most 1047552 bytes",
    ),
    ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
]


@pytest.mark.parametrize(("fields", "param", "told"), REFUSED, ids=[f"{one[1]}: {one[2]}" for one in REFUSED])
async def test_what_cannot_be_kept_is_a_400_that_names_the_field(fields: dict[str, Any], param: str, told: str) -> None:
    client = saying("x")
    model = replace(CALLER, max_model_len=2_000_000)  # the tools are in the prompt, too
    for body in (CHAT | fields, CHAT | fields | {"stream": True}):
        answer = await post(app_of(client, model), "/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.json
        assert told in answer.error["message"]
        assert len(answer.error["message"]) < 1000
    assert not client.submissions


@pytest.mark.parametrize(
    ("family", "schema", "param"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "a"}}}, "parameters.properties.a"),
        ("pythonic", {"properties": {"a b": {}}}, "parameters.properties.a b"),
    ],
)
async def test_a_schema_that_the_models_calls_cannot_keep_is_refused_at_the_tool(
    family: str, schema: dict[str, Any], param: str
) -> None:
    body = CHAT | {"tools": [tool("f", schema)], "tool_choice": "required"}
    answer = await post(app_of(saying("x"), replace(CALLER, tool_parser=family)), "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, f"tools.0.function.{param}")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT | {"regex": "a"}, "regex"),
        ("/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("/v1/completions", PROMPT | {"structured_outputs": {"choice": ["a"]}, "n": 2}, "structured_outputs.choice"),
        (
            "/v1/responses",
            {"model": MODEL.id, "input": "hi", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
    ],
)
async def test_a_grammar_that_only_the_engine_refuses_is_a_400_that_names_the_field(
    path: str, body: dict[str, Any], param: str
) -> None:
    refusal = RequestRejected(ErrorCode.INVALID_PARAMETER, "The grammar is too complex.", "grammar")
    for asked in (body, body | {"stream": True}):
        answer = await post(app_of(ScriptedClient(refusal), CALLER), path, asked)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "The grammar is too complex." in answer.error["message"]


async def test_a_token_that_only_the_engines_tokenizer_can_miss_is_refused_by_it(engine: AsyncEngine) -> None:
    given = {"structured_outputs": {"grammar": "start: <[99999]>"}}
    answer = await post(serving(engine), "/v1/chat/completions", CHAT | given)
    assert (answer.status, answer.error["param"]) == (400, "structured_outputs.grammar")
    assert "99999" in answer.error["message"]


async def test_another_refusal_of_the_engines_stays_as_it_is() -> None:
    refusal = RequestRejected(ErrorCode.INVALID_PARAMETER, "No.", "top_k")
    answer: Answer = await post(app_of(ScriptedClient(refusal), CALLER), "/v1/chat/completions", CHAT | {"regex": "a"})
    assert answer.error["param"] == "top_k"
