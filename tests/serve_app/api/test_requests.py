"""Owns the contract of what is accepted. Long:
every field is honoured, neutral or refused by name before the first byte.
Never lets a bad request reach the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import SamplingParams, Token
from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.requests.messages import MAX_TOOLS
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Exchange,
    ScriptedClient,
    app_for,
    chat,
    complete,
    finished,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio


async def refused(client: ScriptedClient, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Return the error of a refusal, which is the same whether or not a stream was asked for."""
    answer = await post(app_for(client), path, body)
    assert answer.status == status, answer.json
    assert not client.submissions
    assert len(b"".join(answer.parts)) < 2000
    if isinstance(body, dict):
        streamed = await post(app_for(client), path, body | {"stream": True})
        assert (streamed.status, streamed.json) == (status, answer.json)
    return answer.error


BAD_CHAT_FIELDS = [
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "x"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": 1}, "stop"),
    ({"stop": ["a", 1]}, "stop.1"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["x" * 800] * 6}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"metadata": 1}, "metadata"),
    ({"n": True}, "n"),
    ({"n": 0}, "n"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "messages"),
    ({"priority": 1.5}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools.0.function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * (MAX_TOOLS + 1)}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"reasoning_effort": "hard"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"reasoning": {"enabled": True}, "enable_thinking": False}, "reasoning.enabled"),
    ({"reasoning": {"depth": 1}}, "reasoning.depth"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty"),
    ({"usage": {"include": 1}}, "usage.include"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.type"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": 1}]}]}, "messages.0.content.0.type"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]},
        "messages.0.tool_calls.0.type",
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": [{"role": "user", "tool_calls": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages.0.reasoning"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    ({"model": None}, "model"),
]

UNSUPPORTED_IN_CHAT = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("documents", [{"text": "x"}]),
    ("functions", [{}]),
    ("guided_json", {}),
    ("guided_choice", ["a"]),
    ("guided_decoding_backend", "auto"),
    ("grammar", "start: /a/"),
    ("chat_template", "x"),
    ("modalities", ["text", "audio"]),
    ("moderation", {}),
    ("mirostat", 2),
]

NEUTRAL_IN_CHAT: dict[str, list[Any]] = {
    "n": [None, 1],
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "response_format": [None, {"type": "text"}],
    "presence_penalty": [None, 0, 0.0],
    "logit_bias": [None, {}],
    "guided_json": [None],
    "parallel_tool_calls": [None, True],
    "user": [None, "me"],
    "metadata": [None, {"team": "x"}],
    "store": [None, False],
    "temperature": [None],
    "stop": [None, [], "", [""], ["", "x"]],
    "repeat_penalty": [None, 1, 1.3],
    "functions": [None, []],
    "function_call": [None, "none", "auto"],
    "best_of": [None, 1],
    "mirostat": [None, 0],
    "typical_p": [1.0],
    "stream_options": [None],
}


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT_FIELDS, ids=lambda value: str(value)[:60])
async def test_a_wrong_value_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = await refused(ScriptedClient(), "/v1/chat/completions", CHAT | fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED_IN_CHAT)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    error = await refused(ScriptedClient(), "/v1/chat/completions", CHAT | {name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 2)])
async def test_completions_refuse_what_they_do_not_do(name: str, value: Any) -> None:
    error = await refused(ScriptedClient(), "/v1/completions", PROMPT | {name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in NEUTRAL_IN_CHAT.items() for v in values])
async def test_values_that_change_nothing_are_accepted(name: str, value: Any) -> None:
    assert (await chat(ScriptedClient([finished()]), **{name: value})).status == 200


@pytest.mark.parametrize("choice", [None, "none", "auto"])
async def test_a_choice_beside_no_tools_is_none(choice: str | None) -> None:
    client = ScriptedClient([finished()])
    assert (await chat(client, tools=[], tool_choice=choice)).status == 200
    assert client.submissions[0].prompt_token_ids == (259, *b"hi", 256, 260)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("web_search", {"tools": [{"type": "web_search", "search_context_size": "low"}]}),
        ("input_audio", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    ],
)
async def test_an_unknown_type_is_refused_by_its_name_and_not_by_a_field_of_it(kind: str, fields: Any) -> None:
    error = await refused(ScriptedClient(), "/v1/chat/completions", CHAT | fields)
    assert f"the type {kind} is not supported by the server; supported are: " in error["message"]
    assert (error["param"].rpartition(".")[2], error["code"]) == ("type", "unsupported_parameter")
    assert error["message"].count(": ") == 2  # no field of it is named


async def test_unknown_fields_are_refused_by_name_at_every_level() -> None:
    client = ScriptedClient()
    error = await refused(client, "/v1/chat/completions", CHAT | {"temprature": None})
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    message = {"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}
    error = await refused(client, "/v1/chat/completions", CHAT | {"messages": [message]})
    assert error["param"] == "messages.0.content.0.colour"


async def test_an_empty_key_of_logit_bias_is_refused_as_any_other_that_is_no_token_id() -> None:
    """Regression: the empty key is false, so it was not checked,
    and Python's own message about int('') went to the client."""
    error = await refused(ScriptedClient(), "/v1/chat/completions", CHAT | {"logit_bias": {"": 1}})
    assert error["message"] == "logit_bias: should have token ids as its keys, but one is ''"


async def test_a_stream_flag_that_is_no_bool_is_refused() -> None:
    answer = await chat(ScriptedClient(), stream="yes")
    assert (answer.status, answer.error["param"]) == (400, "stream")


async def test_missing_fields_are_named() -> None:
    for path, body, param in (
        ("/v1/chat/completions", {"model": MODEL.id}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}, "model"),
        ("/v1/completions", {"model": MODEL.id}, "prompt"),
    ):
        error = await refused(ScriptedClient(), path, body)
        assert (error["param"], error["code"]) == (param, "missing_required_parameter")


async def test_usage_options_without_a_stream_are_refused() -> None:
    answer = await chat(ScriptedClient(), stream_options={"include_usage": True})
    assert (answer.status, answer.error["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "prompt", [None, {}, 5, [1, "a"], ["a", 1], [[1], "a"], [-1], [True], [262], [10**30], [], "", [""], [[]]], ids=str
)
async def test_a_prompt_that_is_no_text_or_known_token_ids_is_refused(prompt: Any) -> None:
    error = await refused(ScriptedClient(), "/v1/completions", PROMPT | {"prompt": prompt})
    assert error["param"].split(".")[0] == "prompt"


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]], ids=str)
async def test_a_prompt_may_be_text_or_token_ids_alone_or_in_a_list_of_one(prompt: Any) -> None:
    client = ScriptedClient([finished()])
    assert (await complete(client, prompt=prompt)).status == 200
    assert client.submissions[0].prompt_token_ids == (104, 105)


async def test_sampling_fields_reach_the_engine() -> None:
    fields = dict(temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=-3, stop_token_ids=[9], ignore_eos=True)
    client = ScriptedClient([finished()])
    await complete(client, max_tokens=9, min_tokens=2, **fields)
    expected = SamplingParams(max_tokens=9, min_tokens=2, **(fields | {"stop_token_ids": (9,)}))  # type: ignore[arg-type]
    assert client.submissions[0].sampling == expected


async def test_what_changes_the_choice_of_tokens_reaches_the_engine() -> None:
    fields: dict[str, Any] = dict(presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.1)
    client = ScriptedClient([finished()])
    asked = {"logit_bias": {"5": 1, "7": -100.0}, "allowed_token_ids": [5, 7], "bad_words": ["ab"], "priority": -3}
    asked |= {"cache_salt": "mine"}
    answer = await complete(client, max_tokens=9, **fields, **asked)
    assert answer.status == 200, answer.json
    assert client.submissions[0].sampling == SamplingParams(
        max_tokens=9,
        logit_bias=((5, 1.0), (7, -100.0)),
        allowed_token_ids=(5, 7),
        bad_words=(tuple(b"ab"), tuple(b" ab")),  # at the beginning, and after a space
        **fields,
    )
    assert (client.submissions[0].priority, client.submissions[0].cache_salt) == (-3, "mine")


@pytest.mark.parametrize(("most", "kept"), [(3, b"xyz"), (None, b"abcxyz"), (6, b"abcxyz"), (7, b"abcxyz")])
async def test_a_truncated_prompt_keeps_its_last_tokens(most: int | None, kept: bytes) -> None:
    client = ScriptedClient([scheduled()], [finished()])
    answer = await complete(client, prompt="abcxyz", truncate_prompt_tokens=most, echo=True)
    assert client.submissions[0].prompt_token_ids == tuple(kept)
    assert answer.json["choices"][0]["text"] == kept.decode()


async def test_a_prompt_that_is_truncated_to_fit_leaves_room_for_the_answer() -> None:
    client = ScriptedClient([finished()])
    assert (await complete(client, prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=20)).status == 200
    assert (await chat(client, truncate_prompt_tokens=-1)).status == 200
    lengths = [len(submission.prompt_token_ids) for submission in client.submissions]
    assert lengths == [MODEL.max_model_len - 20, 5]


@pytest.mark.parametrize("shown", [False, True])
async def test_what_stopped_the_answer_is_shown_where_asked_for(shown: bool) -> None:
    fields = {"include_stop_str_in_output": shown, "skip_special_tokens": False}
    client = ScriptedClient([scheduled()], tokens("ab"), tokens("c. d"), [finished()])
    by_string = await complete(client, stop=["", "c."], **fields)
    assert by_string.json["choices"][0]["text"] == ("abc." if shown else "ab")
    by_token = await complete(client, **fields)
    assert by_token.json["choices"][0]["text"] == ("abc. d<eos>" if shown else "abc. d")


async def test_special_tokens_are_shown_where_asked_for() -> None:
    client = ScriptedClient([scheduled()], [*tokens("a"), Token("r", 257), *tokens("b")], [finished()])
    shown = await complete(client, skip_special_tokens=False)
    assert shown.json["choices"][0]["text"] == "a<|system|>b"
    assert (await complete(client)).json["choices"][0]["text"] == "ab"


async def test_defaults_are_openais() -> None:
    client = ScriptedClient([finished()])
    await complete(client, top_k=-1)
    await chat(client)
    assert client.submissions[0].sampling == SamplingParams(max_tokens=16)
    assert client.submissions[1].sampling == SamplingParams(max_tokens=None)


async def test_max_completion_tokens_wins_over_max_tokens() -> None:
    client = ScriptedClient([finished()])
    await chat(client, max_tokens=5, max_completion_tokens=6)
    assert client.submissions[0].sampling.max_tokens == 6


async def test_text_parts_become_lines_and_names_reach_the_template() -> None:
    client = ScriptedClient([finished()])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(client, messages=[{"role": "developer", "content": parts, "name": "n"}])
    assert client.submissions[0].prompt_token_ids == (258, *b"a\nb", 256, 260)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
    ],
    ids=str,
)
async def test_a_turn_without_content_is_an_empty_one(message: dict[str, Any]) -> None:
    client = ScriptedClient([finished()])
    answer = await chat(client, messages=[message, *CHAT["messages"]])
    assert answer.status == 200, answer.json
    assert client.submissions[0].prompt_token_ids == (260, 256, 259, *b"hi", 256, 260)


async def test_an_empty_list_of_parts_is_an_empty_text() -> None:
    client = ScriptedClient([finished()])
    for content in ([], ""):
        assert (await chat(client, messages=[{"role": "user", "content": content}])).status == 200
    assert {submission.prompt_token_ids for submission in client.submissions} == {(259, 256, 260)}


async def test_a_penalty_of_repetition_has_two_names() -> None:
    client = ScriptedClient([finished()])
    for fields in ({"repeat_penalty": 1.25}, {"repeat_penalty": 1.25, "repetition_penalty": 1.25}):
        assert (await complete(client, **fields)).status == 200
    assert [submission.sampling.repetition_penalty for submission in client.submissions] == [1.25, 1.25]


async def test_an_unknown_model_is_a_404_in_the_words_that_clients_search_for() -> None:
    error = await refused(ScriptedClient(), "/v1/chat/completions", CHAT | {"model": "gpt" * 1000}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "does not exist" in error["message"]
    assert "Could not find" in error["message"]


@pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")])
async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(path: str, field: str) -> None:
    long = "x" * MODEL.max_model_len
    body = (
        CHAT | {"messages": [{"role": "user", "content": long}]} if field == "messages" else PROMPT | {"prompt": long}
    )
    error = await refused(ScriptedClient(), path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "maximum context length is 200 tokens" in error["message"]
    assert error["n_ctx"] == 200
    assert error["n_prompt_tokens"] >= 200


LIMITS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", PROMPT | {"prompt": "x" * 190}, "max_tokens"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 187}]}, "max_tokens"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 187}]}, "max_completion_tokens"),
    ("/v1/responses", {"model": MODEL.id, "input": "x" * 187}, "max_output_tokens"),
    ("/v1/messages", CHAT | {"messages": [{"role": "user", "content": "x" * 187}]}, "max_tokens"),
]
"""Bodies that leave ten tokens of the context, each with its name of the limit."""


@pytest.mark.parametrize(("path", "body", "name"), LIMITS, ids=lambda value: str(value)[-12:])
async def test_more_tokens_than_the_context_has_left_are_cut_and_named(path: str, body: Any, name: str) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    app = app_for(client)
    for stream in (False, True):
        for wanted, ignored in ((11, name), (65_535, name), (10, None)):
            answer = await post(app, path, body | {name: wanted, "stream": stream})
            assert (answer.status, answer.headers.get(HEADER)) == (200, ignored)
    assert [submission.sampling.max_tokens for submission in client.submissions] == [10] * 6


@pytest.mark.parametrize(("path", "body", "name"), LIMITS, ids=lambda value: str(value)[-12:])
async def test_a_strict_server_refuses_more_tokens_than_the_context_has_left(path: str, body: Any, name: str) -> None:
    client = ScriptedClient([finished()])
    answer = await post(app_for(client, strict=True), path, body | {name: 11})
    assert (answer.status, HEADER in answer.headers, client.submissions) == (400, False, [])
    message = answer.json["error"]["message"]
    assert "maximum context length is 200 tokens" in message
    assert "190 tokens and 11 were requested for the answer; at most 10 are left" in message
    assert (await post(app_for(client, strict=True), path, body | {name: 10})).status == 200


async def test_a_default_is_cut_to_what_is_left_in_silence() -> None:
    client = ScriptedClient([finished()])
    answer = await complete(client, prompt="x" * 190)
    assert (answer.status, HEADER in answer.headers) == (200, False)
    assert client.submissions[0].sampling.max_tokens == 10


@pytest.mark.parametrize("wanted", [1, 65_535])
async def test_a_prompt_that_leaves_nothing_is_refused_whatever_the_answer_may_have(wanted: int) -> None:
    client = ScriptedClient()
    error = await refused(client, "/v1/completions", PROMPT | {"prompt": "x" * 200, "max_tokens": wanted})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_an_answer_that_is_cut_below_its_least_length_is_refused() -> None:
    asked = PROMPT | {"prompt": "x" * 190, "max_tokens": 100, "min_tokens": 50}
    error = await refused(ScriptedClient(), "/v1/completions", asked)
    assert (error["param"], "<= max_tokens (10)" in error["message"]) == ("min_tokens", True)


@pytest.mark.parametrize(("wanted", "kept", "left"), [(20, 180, 20), (199, 1, 199), (200, 199, 1), (65_535, 199, 1)])
async def test_a_prompt_truncated_to_fit_leaves_the_room_that_there_can_be(wanted: int, kept: int, left: int) -> None:
    client = ScriptedClient([finished()])
    answer = await complete(client, prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=wanted)
    assert (answer.status, HEADER in answer.headers) == (200, wanted > left)
    (submission,) = client.submissions
    assert (len(submission.prompt_token_ids), submission.sampling.max_tokens) == (kept, left)


async def test_a_long_prompt_is_encoded_in_a_thread_to_the_same_tokens() -> None:
    client = ScriptedClient([finished()])
    text = "x" * 4000 + "yé" * 3000
    model = replace(MODEL, max_model_len=20_000)
    app = create_app(client, Tokenizer.byte_level(), model)
    assert (await post(app, "/v1/completions", PROMPT | {"prompt": text})).status == 200
    assert bytes(client.submissions[0].prompt_token_ids) == text.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "org/tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "org/tiny", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"model": "org/tiny", "prompt": [' + b'"",' * 500_000 + b"1]}",
        b'{"model": "org/tiny", "prompt": [1' + b',""' * 500_000 + b"]}",
        json.dumps({"x" * 100_000: 1}).encode(),
        json.dumps({str(n): 1 for n in range(100_000)}).encode(),
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
async def test_a_body_that_is_hostile_or_no_json_is_a_small_400(body: bytes) -> None:
    await refused(ScriptedClient(), "/v1/completions", body)


@pytest.mark.parametrize(
    "headers",
    [
        [("content-type", "text/plain")],
        [("content-type", "application/x-www-form-urlencoded")],
        [],
        [("content-type", "application/json"), ("content-encoding", "gzip")],
    ],
    ids=str,
)
async def test_another_content_type_is_a_415(headers: list[tuple[str, str]]) -> None:
    body = json.dumps(CHAT).encode()
    answer = await Exchange(app_for(ScriptedClient()), "POST", "/v1/chat/completions", body, headers).finish()
    assert (answer.status, answer.error["type"]) == (415, "invalid_request_error")


async def test_a_charset_after_the_content_type_is_fine() -> None:
    headers = [("content-type", "Application/JSON; charset=utf-8")]
    app = app_for(ScriptedClient([finished()]))
    assert (await Exchange(app, "POST", "/v1/completions", json.dumps(PROMPT).encode(), headers).finish()).status == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_limit_is_a_413_announced_or_not(announced: bool) -> None:
    headers = [("content-type", "application/json")] + ([("content-length", "5000")] if announced else [])
    app = app_for(ScriptedClient(), max_body_bytes=1000)
    answer = await Exchange(app, "POST", "/v1/completions", b"x" * 5000, headers).finish()
    assert (answer.status, answer.error["type"]) == (413, "request_too_large")


async def test_special_tokens_in_a_template_are_written_once() -> None:
    """Encoding a rendered conversation must not add the post-processor's tokens to those of the template."""
    client = ScriptedClient([finished()])
    await chat(client)
    assert client.submissions[0].prompt_token_ids == (259, *b"hi", 256, 260)


async def test_a_conversation_that_the_template_refuses_is_a_400_in_the_templates_words() -> None:
    client = ScriptedClient()
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate("{{ raise_exception('Only one turn, please.') }}", {})
    answer = await post(create_app(client, tokenizer, MODEL), "/v1/chat/completions", CHAT | {"stream": True})
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "Only one turn, please." in answer.error["message"]
