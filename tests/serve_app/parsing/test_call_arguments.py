"""Owns what becomes of a call's arguments that are no JSON object:
they are repaired or shown as they are, and accepted back.
Never tests whole arguments: test_tools does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import FinishReason
from serve_app.api.requests.messages import MessageToolCall
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.parsing.call_arguments import ArgumentRepair, read_arguments, repaired
from tests.serve_app.api.anthropic import test_anthropic
from tests.serve_app.api.generation.test_tools import CALLER as SMALL
from tests.serve_app.api.generation.test_tools import TOOLS, app_of, prompt_of, saying
from tests.serve_app.api.openai.responses import test_responses
from tests.serve_app.harness import CHAT, ScriptedClient, post

pytestmark = pytest.mark.anyio

CALLER = replace(SMALL, max_model_len=20_000)
AS_TEXT = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}!"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}]{% endfor %}"
)
AS_OBJECT = AS_TEXT.replace("c.function.arguments is string", "false")
BY_ITEM = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}!"
    "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}]{% endfor %}"
)
TEMPLATES = Path(__file__).parents[1] / "parsing" / "templates"
USER = {"role": "user", "content": "hi"}
CUT = '{"city": "Os'
BROKEN = [
    CUT,
    "no JSON",
    "[1]",
    '{"city": ' + "9" * 5000 + "}",
    '{"city": ' + "[" * 300 + "]" * 300 + "}",
    "\ufeff{}",
]
IDS = ["cut", "words", "list", "digits", "depth", "mark"]
REPAIRED = [
    (r'{"city": "O \ud83d"}', {"city": "O \ufffd"}),
    (r'{"city": "O \ude00\ud83d\ude00"}', {"city": "O \ufffd\U0001f600"}),
    ('{"city": "a\nb\tc\x00"}', {"city": "a\nb\tc\0"}),
    (r'{"city": "\\ud83d\"\\"}', {"city": '\\ud83d"\\'}),
]


def call_of(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


async def replayed(arguments: str, template: str) -> list[str]:
    """Return the prompts of the three APIs."""
    function = {"name": "weather", "arguments": arguments}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    block = {"type": "tool_use", "id": "c", "name": "weather", "input": {"INVALID_JSON": arguments}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT | {"messages": [USER, called]},
        "/v1/responses": {"input": [USER, {"type": "function_call", "call_id": "c"} | function]},
        "/v1/messages": {"max_tokens": 5, "messages": [USER, {"role": "assistant", "content": [block]}, USER]},
    }
    prompts = []
    for path, body in bodies.items():
        client = saying("x")
        answer = await post(app_of(client, CALLER, template), path, {"model": CALLER.id} | body)
        assert answer.status == 200, answer.json
        prompts.append(prompt_of(client).replace("None", ""))
    return prompts


@pytest.mark.parametrize("arguments", BROKEN, ids=IDS)
async def test_arguments_that_are_no_object_are_shown_to_the_model_as_they_are(arguments: str) -> None:
    for prompt in await replayed(arguments, AS_TEXT):
        assert prompt.startswith(f"[user:hi][assistant:!{arguments}]")


@pytest.mark.parametrize("arguments", BROKEN, ids=IDS)
async def test_a_template_that_wants_an_object_has_them_in_one(arguments: str) -> None:
    written = json.dumps({"INVALID_JSON": arguments}, ensure_ascii=False)
    for template, shown in ((AS_OBJECT, written), (BY_ITEM, f"INVALID_JSON={arguments}")):
        for prompt in await replayed(arguments, template):
            assert prompt.startswith(f"[user:hi][assistant:!{shown}]")


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
async def test_a_models_own_template_shows_them_where_it_shows_calls(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), {"bos_token": "", "eos_token": ""})

    def shown(arguments: str) -> bool:
        call = MessageToolCall.model_validate({"id": "c", "function": {"name": "f", "arguments": arguments}})
        said = {"role": "assistant", "content": "", "tool_calls": [call.for_template()]}
        told = {"role": "tool", "tool_call_id": "c", "content": "what?"}
        return "Oslo" in template.render([USER, said, told], tools=TOOLS)

    if "tool" in template.source:
        assert shown('{"city": "Oslo') == shown('{"city": "Oslo"}')


@pytest.mark.parametrize(("arguments", "expected"), REPAIRED, ids=ascii)
async def test_what_can_be_repaired_is_and_means_the_same(arguments: str, expected: dict[str, Any]) -> None:
    assert read_arguments(arguments) == expected
    repair = ArgumentRepair()
    assert "".join(map(repair.push, arguments)) + repair.finish() == repaired(arguments)
    prompts = await replayed(arguments, AS_TEXT)
    assert all(json.dumps(expected, ensure_ascii=False) in prompt for prompt in prompts)
    message = await test_anthropic.whole_and_streamed(call_of(arguments), tools=test_anthropic.TOOLS)
    assert message["content"][0]["input"] == expected


@pytest.mark.parametrize("text", [CUT, '{"a": 1}', "\\", '"\\', '"\\ud83', r'"\u12"', '\n"\\\n"\n', r'"\ud83d\u0041"'])
def test_the_rest_is_left_as_it_is_however_it_is_cut(text: str) -> None:
    repair = ArgumentRepair()
    pieces = "".join(map(repair.push, text)) + repair.finish()
    assert pieces == repaired(text) == text.replace(r"\ud83d\u", r"\ufffd\u")


@pytest.mark.parametrize("arguments", ['{"city": }', '{"city": ' + "9" * 5000 + "}"], ids=["hole", "digits"])
async def test_an_anthropic_call_with_broken_arguments_is_never_one_with_none(arguments: str) -> None:
    whole = (await test_anthropic.ask(saying(call_of(arguments)), tools=test_anthropic.TOOLS)).json
    (block,) = whole["content"]
    assert block["input"] == {"INVALID_JSON": arguments}
    streamed = await test_anthropic.ask(saying(call_of(arguments), 9), tools=test_anthropic.TOOLS, stream=True)
    deltas = [one["delta"] for one in test_anthropic.events(streamed) if one["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == arguments


async def test_a_call_that_its_length_cut_says_so_and_has_what_there_is() -> None:
    said = call_of("{").removesuffix("}\n</tool_call>") + '"city": "Oslo", "day'
    message = (await test_anthropic.ask(saying(said, reason=FinishReason.LENGTH), tools=test_anthropic.TOOLS)).json
    assert (message["content"][0]["input"], message["stop_reason"]) == ({"city": "Oslo"}, "max_tokens")


async def test_an_answer_with_broken_arguments_can_be_sent_back() -> None:
    """The server accepts back what it answered: otherwise the session would be dead."""
    said, answered = call_of(CUT).removesuffix("}\n</tool_call>"), ScriptedClient()
    for path, key in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        tools = TOOLS if key == "messages" else test_responses.TOOLS
        first = await post(app_of(saying(said)), path, {"model": CALLER.id, key: [USER], "tools": tools})
        turn = [first.json["choices"][0]["message"]] if key == "messages" else first.json["output"]
        answered = saying("x")
        again = await post(app_of(answered, CALLER, AS_TEXT), path, {"model": CALLER.id, key: [USER, *turn, USER]})
        assert again.status == 200, again.json
        assert CUT in prompt_of(answered)
