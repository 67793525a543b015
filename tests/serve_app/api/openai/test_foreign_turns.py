"""Owns the promise that turns as agents and frameworks write them are taken, where OpenAI's types do not allow them.
Never runs one; tests/clients does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.build.engine import FAKE_IMAGES
from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.requests.content_parts import MESSAGE_HINTS, MESSAGE_UNSUPPORTED
from serve_app.api.requests.messages import Message
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from tests.serve_app.harness import CHAT, MODEL, ScriptedClient, finished, post
from tests.support.image_files import data_url, make_image

pytestmark = pytest.mark.anyio

SEEING = replace(MODEL, max_model_len=2000, tool_parser="hermes", images=ImageIntake(FAKE_IMAGES, ImageSettings()))
USER = {"role": "user", "content": "Look."}
TWO_CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in ("a", "b")
    ],
}


def picture(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(make_image(seed, 32, 32))}}


def result(call_id: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": list(content)}


async def sent(*messages: dict[str, Any], path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """Return the answer, the prompt's text with a mark for each token of an image, and what stands in the prompt."""
    client, tokenizer = ScriptedClient([finished()]), Tokenizer.byte_level(images=True)
    answer = await post(create_app(client, tokenizer, SEEING), path, CHAT | {"messages": list(messages)} | fields)
    submission = client.submissions[0] if client.submissions else None
    prompt = "" if submission is None else tokenizer.decode(submission.prompt_token_ids)
    return answer, prompt, () if submission is None else submission.inputs


async def test_images_of_results_are_shown_after_all_of_them_as_the_users() -> None:
    """Qwen Code, kimi-cli and LangChain put what a tool saw into its message, as the other two APIs allow."""
    text = {"type": "text", "text": "seen"}
    shown = [TWO_CALLS, result("a", text, picture(1)), result("b", picture(2), text)]
    answer, prompt, inputs = await sent(USER, *shown, USER)
    assert answer.status == 200, answer.json
    marks = "<|image|>" * sum(one.num_tokens for one in inputs)
    _, _, after = prompt.partition("</tool_call><eos>")
    results = "<|tool|>seen\n[image]<eos><|tool|>[image]\nseen<eos>"
    assert after == f"{results}<|user|>{marks}<eos><|user|>Look.<eos><|assistant|>"
    place = {"type": "text", "text": "[image]"}
    as_users = [
        result("a", text, place),
        result("b", place, text),
        {"role": "user", "content": [picture(1), picture(2)]},
    ]
    _, same, pixels = await sent(USER, TWO_CALLS, *as_users, USER)
    assert (same, pixels) == (prompt, inputs)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_result_says_where_an_image_stood_whatever_the_api(path: str) -> None:
    """Regression: by chat and by responses, the result of a tool that returns only a picture was empty."""
    url = data_url(make_image(1, 32, 32))
    names = ("a", "b")
    seen = {"type": "input_image", "image_url": url}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
    use, used = {"type": "tool_use", "name": "look", "input": {}}, {"type": "tool_result", "content": [block]}
    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    uses, used_all = [use | {"id": name} for name in names], [used | {"tool_use_id": name} for name in names]
    outputs = [{"type": "function_call_output", "call_id": name, "output": [seen]} for name in names]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [USER, TWO_CALLS, *(result(name, picture(1)) for name in names)]},
        "/v1/responses": {"input": [USER, *(call | {"call_id": name} for name in names), *outputs]},
        "/v1/messages": {
            "messages": [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": used_all}],
            "max_tokens": 8,
        },
    }
    client, tokenizer = ScriptedClient([finished()]), Tokenizer.byte_level(images=True)
    answer = await post(create_app(client, tokenizer, SEEING), path, {"model": MODEL.id} | bodies[path])
    assert answer.status == 200, answer.json
    _, _, after = tokenizer.decode(client.submissions[0].prompt_token_ids).partition("</tool_call><eos>")
    marks = "<|image|>" * sum(one.num_tokens for one in client.submissions[0].inputs)
    assert after == f"<|tool|>[image]<eos><|tool|>[image]<eos><|user|>{marks}<eos><|assistant|>"


async def test_a_refused_image_of_a_result_is_named_by_its_place() -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer, _, _ = await sent(USER, TWO_CALLS, result("a", picture(1), broken))
    assert (answer.status, answer.error["param"]) == (400, "messages.2.content.1.image_url")
    answer, _, _ = await sent(USER, {"role": "assistant", "content": [picture(1)]}, USER)
    assert answer.error["message"] == (
        "messages.1.content: image parts are only allowed in a user's message or a tool's, but the role is assistant"
    )


async def test_names_of_parts_are_labels() -> None:
    """LangChain gives each text an id of its own, and keeps the index that a stream's block had."""
    named = {"type": "text", "text": "Look.", "id": "lc_3f2c", "index": 0}
    answer, prompt, _ = await sent({"role": "user", "content": [named]})
    assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.json
    assert prompt == (await sent(USER))[1]


# An answer as @openai/agents 0.20 sends it back: the rest of the message stands in its text, too.
CALLS = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
COPIES = {"role": "assistant", "refusal": None, "annotations": [], "reasoning": "Hm.", "reasoning_content": "Hm."}


@pytest.mark.parametrize("copies", [COPIES, COPIES | {"tool_calls": CALLS}, {"annotations": []}], ids=len)
async def test_an_answer_may_repeat_its_message_in_its_text(copies: dict[str, Any]) -> None:
    """Regression: every agent of @openai/agents failed at its second request by chat, whole or streamed."""
    answered = {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": CALLS}
    told = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    part = {"type": "text", "text": "Let me see.", **copies}
    answer, prompt, _ = await sent(USER, answered | {"content": [part]}, told)
    assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.json
    assert prompt == (await sent(USER, answered, told))[1]


@pytest.mark.parametrize(
    ("copies", "lost"),
    [
        ({"tool_calls": CALLS}, ["tool_calls"]),
        ({"reasoning": "Hm.", "tool_calls": CALLS}, ["reasoning", "tool_calls"]),
        ({"reasoning_content": "Hm."}, ["reasoning_content"]),
        ({"reasoning": "", "reasoning_content": None, "tool_calls": [], "annotations": [{}], "parsed": 1}, []),
    ],
    ids=["calls", "both", "thoughts", "nothing"],
)
async def test_a_copy_of_what_the_message_does_not_have_is_named(copies: dict[str, Any], lost: list[str]) -> None:
    """Regression: an answer's calls and thoughts that stand in its text alone were left out without a word."""
    part = {"type": "text", "text": "Let me see.", **copies}
    turns = [USER, {"role": "assistant", "content": [part]}, USER]
    answer, prompt, _ = await sent(*turns)
    named = ", ".join(f"messages.content.{name}" for name in lost)
    assert (answer.status, answer.headers.get(HEADER, "")) == (200, named), answer.json
    assert prompt == (await sent(USER, {"role": "assistant", "content": "Let me see."}, USER))[1]
    app = create_app(ScriptedClient([finished()]), Tokenizer.byte_level(images=True), SEEING, strict=True)
    strict = await post(app, "/v1/chat/completions", CHAT | {"messages": turns})
    assert strict.status == (400 if lost else 200)
    if lost:
        told = (strict.error["param"], strict.error["code"])
        assert told == (f"messages.1.content.0.{lost[0]}", "unsupported_parameter")


@pytest.mark.parametrize("own", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("copy", ["reasoning", "reasoning_content"])
async def test_a_copy_of_thoughts_is_one_by_either_name(own: str, copy: str) -> None:
    part = {"type": "text", "text": "Let me see.", copy: "Hm."}
    answer, _, _ = await sent(USER, {"role": "assistant", "content": [part], own: "Hm."}, USER)
    assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.json


OF_MESSAGES = [
    *((name, None) for name in (*Message.model_fields, *MESSAGE_UNSUPPORTED, *MESSAGE_HINTS) if name != "content"),
    *((name, value) for of in (MESSAGE_UNSUPPORTED, MESSAGE_HINTS) for name, values in of.items() for value in values),
    *((name, {"as": "another server wrote it"}) for name in (*MESSAGE_HINTS, "parsed")),
    ("refusal", ""),
]


@pytest.mark.parametrize(("name", "value"), OF_MESSAGES, ids=repr)
async def test_a_text_takes_what_its_message_takes(name: str, value: Any) -> None:
    """Regression: it took five of the fields, while other servers' answers have more, most of them null."""
    answered = {"role": "assistant", "content": "Let me see."}
    field = {name: value} if name != "role" else {}
    answer, prompt, _ = await sent(USER, answered | field, USER)
    named = answer.headers.get(HEADER)
    assert (answer.status, named) == (200, f"messages.{name}" if value and name != "parsed" else None), answer.json
    part = {"type": "text", "text": "Let me see.", name: value}
    answer, same, _ = await sent(USER, answered | {"content": [part]}, USER)
    of_part = named and named.replace("messages.", "messages.content.")
    assert (answer.status, answer.headers.get(HEADER), same) == (200, of_part, prompt), answer.json


async def test_only_an_answer_repeats_its_message() -> None:
    answer, _, _ = await sent({"role": "user", "content": [{"type": "text", "text": "Look.", "reasoning": "Hm."}]})
    assert (answer.status, answer.error["param"]) == (400, "messages.0.content.0.reasoning")
    answer, _, _ = await sent({"role": "user", "content": [{"type": "text", "text": "Look.", "role": "assistant"}]})
    assert (answer.status, answer.error["param"]) == (400, "messages.0.content.0.role")


@pytest.mark.parametrize(
    "empty", [{"annotations": []}, {"reasoning": ""}, {"reasoning_content": ""}, {"tool_calls": []}]
)
async def test_an_empty_copy_is_none_whoever_speaks(empty: dict[str, Any]) -> None:
    """Regression: a user's message may have these fields, but its text was refused for them."""
    answer, prompt, _ = await sent(USER | empty)
    assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.json
    answer, same, _ = await sent({"role": "user", "content": [{"type": "text", "text": "Look.", **empty}]})
    assert (answer.status, answer.headers.get(HEADER), same) == (200, None, prompt), answer.json
